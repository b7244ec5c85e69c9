//! The command line: subcommands and typed flags.
//!
//! `arguments → clap → the arguments of one subcommand`; those of `serve` are in `serve_args.rs`.
//!
//! clap refuses impossible values before the program opens, creates or waits for anything.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::args::ctl_args::{self, CtlArgs};
use crate::args::image_args::{self, ImageArgs};
use crate::args::monitor_args::MonitorCommand;
use crate::args::serve_args::{self, ServeArgs};
use crate::args::vmm_args::{self, VmmArgs};
use crate::completions::Shell;
use crate::engines::EnginesArgs;
use crate::helper::client::SUBCOMMAND;
use crate::logging::LogArgs;

const EXAMPLES: &str = "\
Examples:
  bareblk serve disk.raw --socket /run/vm1.sock
  bareblk vmm-args /run/vm1.sock                   options for the VM's command line
  bareblk bench --socket /run/vm1.sock --rw randread --iodepth 32 --runtime 10
  bareblk lab run aio --out results --quick        repeats a published experiment on this host

See `bareblk COMMAND --help`.";

const ENGINES_EXAMPLES: &str = "\
Examples:
  bareblk engines                                  lists the engines of this host
  bareblk engines disk.raw --cache writeback       also shows which one `--engine auto` picks for this image";

/// Shown only on the reference page: `--help` is answered by `bareblk-bench` itself.
const SECOND_PROGRAM: &str = "The program bareblk-bench runs this command and documents its options.";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  bareblk completions bash > ~/.local/share/bash-completion/completions/bareblk
  bareblk completions zsh > ~/.zfunc/_bareblk
      with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  bareblk completions fish > ~/.config/fish/completions/bareblk.fish";

/// Description of `bench`, a command of `bareblk-bench`.
pub const BENCH: &str = "Run a load, described in fio's options, on a socket or file, and measure it";
/// Description of `lab`, a command of `bareblk-bench`.
pub const LAB: &str = "Repeat published experiments on this program's own parts";

/// Disks for virtual machines, served over vhost-user.
#[derive(Debug, Parser)]
#[command(name = "bareblk", version, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve raw disk images, or block devices, on vhost-user sockets
    #[command(after_help = serve_args::EXAMPLES)]
    Serve(Box<ServeArgs>),
    /// The privileged process that `serve` starts before it drops its own privileges
    #[command(hide = true, name = SUBCOMMAND)]
    Helper(LogArgs),
    /// Inspect and change a running server
    #[command(after_help = ctl_args::EXAMPLES)]
    Ctl(CtlArgs),
    /// Print the options that a virtual machine needs for a served disk
    #[command(after_help = vmm_args::EXAMPLES)]
    VmmArgs(VmmArgs),
    /// Print which I/O engines work on this host, which do not and why, and which one suits an image
    #[command(after_help = ENGINES_EXAMPLES)]
    Engines(EnginesArgs),
    /// Inspect qcow2 images
    #[command(after_help = image_args::EXAMPLES)]
    Image(ImageArgs),
    #[command(about = BENCH, after_help = SECOND_PROGRAM)]
    Bench,
    #[command(about = LAB, after_help = SECOND_PROGRAM)]
    Lab,
    #[command(flatten)]
    Monitor(MonitorCommand),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell that will run the script
        shell: Shell,
    },
    /// Write the manual pages, one for each command, into a folder
    #[command(hide = true)]
    Man {
        /// An existing folder
        folder: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn reference_page_is_what_the_command_line_says() {
        xtask::cli_page::check("docs/reference/cli.md", Cli::command());
    }
}
