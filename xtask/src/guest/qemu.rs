//! The QEMU that runs a guest, and the firmware with which the guest starts.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::debian::DebianFolder;
use crate::command;

const PROGRAM: &str = "qemu-system-x86_64";

/// The firmware from Debian's package `ovmf`. Each guest gets a copy of the variables.
const OVMF_CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const OVMF_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

/// This machine's QEMU, or that of another Debian release.
#[derive(Debug, Clone, Default)]
pub struct Qemu {
    folder: Option<DebianFolder>,
}

/// The firmware, which runs before the operating system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// QEMU's own PC BIOS.
    SeaBios,
    /// UEFI firmware, of the same release as QEMU.
    Ovmf,
}

impl Qemu {
    /// The QEMU in PATH.
    #[must_use]
    pub fn of_this_machine() -> Self {
        Self::default()
    }

    /// The QEMU in this folder, which runs inside the folder.
    #[must_use]
    pub fn of(folder: &DebianFolder) -> Self {
        Self { folder: Some(folder.clone()) }
    }

    /// The version, such as `7.2.22`.
    ///
    /// # Errors
    /// QEMU does not run, or prints no version.
    pub fn version(&self) -> Result<String> {
        let text = command::output(self.command().arg("--version"))?;
        version_of(&text).with_context(|| format!("`{PROGRAM} --version` says: {}", text.trim()))
    }

    pub(super) fn command(&self) -> Command {
        match &self.folder {
            Some(folder) => folder.command(PROGRAM),
            None => Command::new(PROGRAM),
        }
    }

    /// The option is `reconnect=` until QEMU 9.1 and `reconnect-ms=` since 9.2.
    pub(super) fn reconnect_option(&self, interval_s: u32) -> Result<String> {
        let in_ms = is_at_least(&self.version()?, (9, 2));
        let interval_ms = u64::from(interval_s) * 1000;
        Ok(if in_ms { format!(",reconnect-ms={interval_ms}") } else { format!(",reconnect={interval_s}") })
    }

    /// Copies OVMF's variables to `dir`. Returns the `-drive` values for code and variables.
    pub(super) fn ovmf_drives(&self, dir: &Path) -> Result<[String; 2]> {
        let from = self.on_this_machine(OVMF_VARIABLES);
        let variables = dir.join("ovmf-variables");
        let copied = std::fs::copy(&from, &variables);
        copied.with_context(|| format!("no OVMF at {}: run `cargo xtask setup --long`", from.display()))?;
        let variables = variables.to_str().context("the guest's folder is not UTF-8")?.replace(',', ",,");
        let flash = "if=pflash,format=raw";
        Ok([format!("{flash},readonly=on,file={OVMF_CODE}"), format!("{flash},file={variables}")])
    }

    /// Whether the package with OVMF is installed.
    #[must_use]
    pub fn has_ovmf(&self) -> bool {
        [OVMF_CODE, OVMF_VARIABLES].iter().all(|path| self.on_this_machine(path).exists())
    }

    fn on_this_machine(&self, path: &str) -> PathBuf {
        let root = self.folder.as_ref().map_or(PathBuf::from("/"), DebianFolder::root);
        root.join(path.trim_start_matches('/'))
    }
}

/// Parses `QEMU emulator version 7.2.22 (Debian …)`.
fn version_of(text: &str) -> Option<String> {
    let rest = text.split_once("version ")?.1;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    (end > 0).then(|| rest[..end].to_owned())
}

fn is_at_least(version: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_the_number_after_the_word() {
        let debian = version_of("QEMU emulator version 7.2.22 (Debian 1:7.2)\n");
        assert_eq!(debian.as_deref(), Some("7.2.22"));
        assert_eq!(version_of("QEMU emulator version 10.0.2\n").as_deref(), Some("10.0.2"));
        assert_eq!(version_of("something else"), None);
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(is_at_least("9.2.0", (9, 2)) && is_at_least("10.0", (9, 2)));
        assert!(!is_at_least("7.2.22", (9, 2)) && !is_at_least("9.1.9", (9, 2)));
    }
}
