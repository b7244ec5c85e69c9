//! A stock Linux guest in stock QEMU, for tests and the demo.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use std::time::Duration;
//! use xtask::guest::{GuestImage, Vm};
//!
//! let image = GuestImage::prepare(|step| eprintln!("{step}"))?;
//! let output = Vm::new(&image)
//!     .disk_socket("/tmp/vm1.sock", 2)
//!     .script("echo BB:SERIAL=$(cat /sys/block/vda/serial)")
//!     .timeout(Duration::from_secs(60))
//!     .run()?;
//! assert_eq!(output.exit_code, Some(0));
//! assert_eq!(output.value("SERIAL"), Some("0123"));
//! # Ok(()) }
//! ```
//!
//! `GuestImage` (kernel + file system, cached) -> `Vm` (what to run) -> `RunningVm` (QEMU) -> `GuestOutput`.
//! `DebianFolder`: programs, kernel and firmware of another Debian release.
//! `OwnTests`: a test binary runs itself again in a guest, on the guest's kernel.
//!
//! The test starts the server whose disk the guest uses.

mod boot_disk;
mod debian;
mod fat;
mod image;
mod initramfs;
mod kernel;
mod output;
mod own_tests;
mod qemu;
mod remote_libraries;
mod running;
mod vm;
#[cfg(test)]
mod vm_tests;

pub use debian::{DebianFolder, Prepared};
pub use image::GuestImage;
pub use kernel::unpack_package;
pub use output::{Console, GuestOutput};
pub use own_tests::{OwnTests, TestsPassed};
pub use qemu::{Firmware, Qemu};
pub use running::RunningVm;
pub use vm::{Accel, KERNEL_COMMAND_LINE, Vm};
