//! `cargo xtask …`: the project's development commands, one module per subcommand.
#![forbid(unsafe_code)]

mod bench;
mod ceph;
mod deb;
mod demo;
mod docs;
mod fuzz;
mod kmod;
mod layers;
mod man;
mod mutants;
mod origin;
mod release;
mod setup;
mod source_text;
mod source_tree;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// bareblk's development commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Shows bareblk at work: a real guest runs fio on a served disk, and the host runs the same fio for comparison
    Demo(demo::Args),
    /// Measures the cost of a request in the device half, and keeps the result
    Bench(bench::Args),
    /// Runs everything that CI runs
    Test(test::Args),
    /// Installs the Debian packages that demo and test need, after one question
    Setup(setup::ChoreArgs),
    /// Weakens the locks in every way, one change at a time, and reports which check notices each change
    Mutants(mutants::Args),
    /// Runs libFuzzer on input from hostile guests, front-ends, clients and files
    Fuzz(fuzz::Args),
    /// Builds the Debian packages
    Deb(deb::Args),
    /// Builds the book of docs/ and checks its links
    Docs(docs::Args),
    /// Makes all files of a release, or checks what must agree before a release
    Release(release::Args),
    /// Writes the manual pages
    Man(man::Args),
    /// Starts or stops a Ceph cluster of one node below a folder, from Debian's packages, without installing them
    Ceph(ceph::Args),
    /// Builds the kernel module vhost_blk and tests it in an emulated guest
    Kmod(kmod::Args),
    /// Checks the crates' dependencies against the table in ARCHITECTURE.md
    Layers,
    /// Checks the rules for source files that a program can check
    Tidy(tidy::Args),
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let result = match Cli::parse().chore {
        Chore::Demo(args) => demo::run(&args).map(done),
        Chore::Bench(args) => bench::run(&args).map(done),
        Chore::Test(args) => test::run(&args),
        Chore::Setup(args) => setup::run(&args).map(done),
        Chore::Mutants(args) => mutants::run(&args).map(done),
        Chore::Fuzz(args) => fuzz::run(&args).map(done),
        Chore::Deb(args) => deb::run(&args).map(done),
        Chore::Docs(args) => docs::run(&args).map(done),
        Chore::Release(args) => release::run(&args).map(done),
        Chore::Man(args) => man::run(&args).map(done),
        Chore::Ceph(args) => ceph::run(&args).map(done),
        Chore::Kmod(args) => kmod::run(&args).map(done),
        Chore::Layers => layers::run().map(done),
        Chore::Tidy(args) => tidy::run(&args).map(done),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_has_no_contradictions() {
        Cli::command().debug_assert();
    }
}
