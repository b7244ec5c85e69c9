//! `cargo xtask docs`: builds the book from the repository's pages, and checks its links.
//!
//! `generated pages → docs/SUMMARY.md's pages (pages.rs) → target/book/src (stage.rs) → mdbook → target/book/html (built.rs)`

mod built;
pub(crate) mod pages;
mod stage;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use xtask::{cli_page, command, workspace};

use crate::source_tree::read_tree;
use crate::tidy;

/// The version of the program that builds the book.
const MDBOOK: &str = "0.5.4";
/// The crates whose command lines are pages of the book, and the cargo target with the page's test.
const PROGRAMS: [(&str, &str); 2] = [("bareblk", "--lib"), ("bareblk_bench", "--bins")];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Do not rewrite the pages that are generated from the programs
    #[arg(long)]
    keep_generated: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if !args.keep_generated {
        write_generated_pages()?;
    }
    let files = read_tree()?;
    refuse(&tidy::links::broken(&files))?;
    refuse(&tidy::links::missing_in_the_book(&files))?;
    let book = pages::book(&files).with_context(|| format!("{} is missing", pages::SUMMARY))?;
    let folder = workspace::root().join("target/book");
    stage::stage(&book, &files, &folder.join("src"))?;
    command::run(Command::new(mdbook()?).arg("build").arg(workspace::root()))?;
    let html = folder.join("html");
    refuse(&built::broken_links(&html)?)?;
    println!("{} pages: {}", book.pages.len(), html.join("index.html").display());
    Ok(())
}

fn refuse(complaints: &[String]) -> Result<()> {
    if complaints.is_empty() {
        Ok(())
    } else {
        bail!("the book's links are broken:\n{}", complaints.join("\n"))
    }
}

/// Each program's own test writes its page.
fn write_generated_pages() -> Result<()> {
    for (name, target) in PROGRAMS {
        let mut test = Command::new(workspace::cargo());
        test.args(["test", "--quiet", "--package", name, target, "--", cli_page::TEST_NAME]);
        command::run(test.env(cli_page::WRITE, "1").current_dir(workspace::root()))?;
    }
    Ok(())
}

/// The program's path; installs it below `target/` first, if it is not there.
fn mdbook() -> Result<PathBuf> {
    let folder = workspace::root().join("target/tools");
    let program = folder.join("bin/mdbook");
    if is_wanted(&program) {
        return Ok(program);
    }
    println!("installing mdbook {MDBOOK} from crates.io into {}; this takes a few minutes", folder.display());
    let mut install = Command::new(workspace::cargo());
    // A debug build: mdbook compiles sooner, and still builds the small book in seconds.
    install.args([
        "install",
        "mdbook",
        "--locked",
        "--debug",
        "--no-default-features",
        "--features",
        "search",
    ]);
    command::run(install.args(["--version", MDBOOK, "--root"]).arg(&folder))?;
    Ok(program)
}

fn is_wanted(program: &Path) -> bool {
    let said = command::output(Command::new(program).arg("--version"));
    said.is_ok_and(|version| version.trim() == format!("mdbook v{MDBOOK}"))
}
