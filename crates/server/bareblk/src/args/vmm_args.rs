//! The options of `bareblk vmm-args`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{ArgGroup, Args, ValueEnum};

use crate::args::values::{disk_name, queue_size, queues, size_bytes};

pub const EXAMPLES: &str = "\
Examples:
  bareblk vmm-args /run/vm1.sock --memory 8G
      for the QEMU that is installed here
  bareblk vmm-args /run/vm1.sock --qemu-version 10.0
  bareblk vmm-args --disk root --control /run/bareblk/control.sock
      asks the running server for the disk's socket and queue size
  bareblk vmm-args /run/vm1.sock --vmm libvirt --queues 4 --target vdb
  bareblk vmm-args /run/vm1.sock --vmm cloud-hypervisor --queues 4
  bareblk vmm-args /run/vm1.sock --vmm firecracker";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which disk").args(["path", "socket", "disk"]).required(true))]
pub struct VmmArgs {
    /// The socket given to `bareblk serve`
    #[arg(value_name = "SOCKET")]
    pub path: Option<PathBuf>,

    /// The socket given to `bareblk serve`, as an option
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Ask a running server for the socket and queue size of this disk
    #[arg(long, value_name = "NAME", value_parser = disk_name)]
    pub disk: Option<String>,

    /// With --disk: the server's control socket [default: $BAREBLK_CONTROL, or /run/bareblk/control.sock]
    #[arg(long, value_name = "PATH", requires = "disk", conflicts_with_all = ["path", "socket"])]
    pub control: Option<PathBuf>,

    /// The virtual machine monitor that needs the arguments
    #[arg(long, value_enum, default_value_t = Vmm::Qemu)]
    pub vmm: Vmm,

    /// QEMU's version, which decides between `reconnect` and `reconnect-ms` [default: that of the installed QEMU]
    #[arg(long, value_name = "X.Y")]
    pub qemu_version: Option<QemuVersion>,

    /// Number of queues, at most one per vCPU [default: QEMU, libvirt and crosvm: their own choice; cloud-hypervisor:
    /// 1]
    #[arg(long, value_name = "N", value_parser = queues)]
    pub queues: Option<u16>,

    /// Size of each queue, at most `--queue-size` of `bareblk serve` [default: 1024, or what --disk allows]
    #[arg(long, value_name = "N", value_parser = queue_size)]
    pub queue_size: Option<u16>,

    /// The guest's memory (M, G, T: powers of 1024) [default: 4G, as an example]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes)]
    pub memory: Option<u64>,

    /// libvirt: the guest's name for the disk
    #[arg(long, value_name = "DEV", default_value = "vda", value_parser = target)]
    pub target: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    Qemu,
    Libvirt,
    CloudHypervisor,
    Firecracker,
    Crosvm,
}

fn target(text: &str) -> Result<String> {
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_plain.then(|| text.to_owned()).context("give a name such as vda, of letters and digits")
}

/// The first two numbers of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Parses versions such as "10", "7.2" and "9.2.4".
impl FromStr for QemuVersion {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split('.');
        let mut number = |default: &'static str| parts.next().unwrap_or(default).parse().ok();
        let version = number("").zip(number("0")).map(|(major, minor)| Self { major, minor });
        version.context("give QEMU's version, such as 7.2 or 10.0")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_its_first_two_numbers() {
        let version =
            |text: &str| text.parse::<QemuVersion>().map(|QemuVersion { major, minor }| (major, minor));
        assert_eq!(["7.2.22", "10", "9.2"].map(|text| version(text).unwrap()), [(7, 2), (10, 0), (9, 2)]);
        assert!(version("").is_err() && version("v9").is_err() && version("9.x").is_err());
        assert!("9.10".parse::<QemuVersion>().unwrap() > "9.2".parse().unwrap());
    }

    #[test]
    fn target_cannot_break_out_of_the_xml() {
        assert!(target("vdb").is_ok() && target("").is_err() && target("vda'/>").is_err());
    }
}
