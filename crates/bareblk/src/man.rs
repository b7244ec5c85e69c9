//! `bareblk man FOLDER`: the manual pages, made of the command line's own definition, so that they cannot differ from it.
//!
//! `bareblk.1`, `bareblk-serve.1`, …, `bareblk-ctl-add.1`, …; for `cargo xtask man` and the package.
//!
//! Not here: what stands in them (each command's arguments), the configuration file's keys (docs/config.md).

use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::cli::Cli;

/// One page for each command that is not hidden, however deep.
pub fn write(folder: &Path) -> Result<()> {
    let written = clap_mangen::generate_to(Cli::command(), folder);
    written.with_context(|| format!("cannot write the manual pages into {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_can_be_seen_has_a_page_with_its_options() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(page("bareblk.1").contains("bareblk\\-serve(1)"), "{}", page("bareblk.1"));
        assert!(page("bareblk-serve.1").contains("queue\\-size"));
        assert!(page("bareblk-ctl-add.1").contains("bareblk ctl add"), "{}", page("bareblk-ctl-add.1"));
        assert!(!folder.path().join("bareblk-man.1").exists());
    }

    #[test]
    fn folder_that_is_not_there_is_named() {
        let error = write(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/at/all"), "{error:#}");
    }
}
