//! `cargo xtask man`: writes the manual pages, compressed as in a package.
//!
//! - `bareblk man` generates the commands' pages from its own command line. The configuration file's page
//!   comes from docs/reference/config.md.
//!
//! Not here: the pages' text.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use xtask::{command, config_page, workspace};

use crate::deb::program::{self, Profile};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder for the pages [default: target/man]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let folder = match &args.out {
        Some(folder) => folder.clone(),
        None => workspace::build_dir()?.join("man"),
    };
    let count = write(&program::build(Profile::Dev)?, &folder)?;
    println!(
        "{count} pages in {}: try `man -l {}`",
        folder.display(),
        folder.join("bareblk-serve.1").display()
    );
    Ok(())
}

/// Writes this program's pages; returns how many.
pub(crate) fn write(program: &Path, folder: &Path) -> Result<usize> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    command::output(Command::new(program).arg("man").arg(folder))?;
    let source = workspace::root().join("docs/reference/config.md");
    let text = fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let page = folder.join(config_page::FILE_NAME);
    fs::write(&page, config_page::page(&text)).with_context(|| format!("cannot write {}", page.display()))?;
    Ok(fs::read_dir(folder)?.count())
}
