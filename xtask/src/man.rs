//! `cargo xtask man`: writes the manual pages, compressed as in a package.
//!
//! - `bareblk man` and `bareblk-bench man` generate their commands' pages from their own command lines; `bareblk man`
//!   also writes those of `bareblk-monitor`. The configuration file's page comes from docs/reference/config.md.

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
    let programs = program::build(Profile::Dev)?;
    for name in ["bareblk", "bareblk-bench"] {
        write_commands(&programs.join(name), &folder)?;
    }
    write_config(&folder)?;
    let count = fs::read_dir(&folder)?.count();
    println!(
        "{count} pages in {}: try `man -l {}`",
        folder.display(),
        folder.join("bareblk-serve.1").display()
    );
    Ok(())
}

/// Writes the pages of this program's commands.
pub(crate) fn write_commands(program: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    command::output(Command::new(program).arg("man").arg(folder)).map(drop)
}

/// Writes the page of the configuration file.
pub(crate) fn write_config(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let source = workspace::root().join("docs/reference/config.md");
    let text = fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let page = folder.join(config_page::FILE_NAME);
    fs::write(&page, config_page::page(&text)).with_context(|| format!("cannot write {}", page.display()))
}
