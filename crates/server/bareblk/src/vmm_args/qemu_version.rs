//! The version of the QEMU that is installed on this host.

use std::process::{Command, Stdio};

use crate::args::vmm_args::QemuVersion;

/// Fedora's and Debian's other names of the program for this host's processor.
const OTHER_NAMES: [&str; 2] = ["/usr/libexec/qemu-kvm", "kvm"];

/// The version of the installed QEMU; `None`: there is no QEMU, or its version is not recognized.
pub fn installed() -> Option<QemuVersion> {
    let own = format!("qemu-system-{}", std::env::consts::ARCH);
    [own.as_str()].into_iter().chain(OTHER_NAMES).find_map(|program| {
        let run = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
        version_in(&String::from_utf8_lossy(&run.stdout))
    })
}

/// `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`.
fn version_in(text: &str) -> Option<QemuVersion> {
    let (_, rest) = text.split_once("QEMU emulator version ")?;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    rest.get(..end)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_found_in_what_qemu_prints_and_in_nothing_else() {
        let of = |text| version_in(text).map(|version| version.to_string());
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022";
        assert_eq!(of(debian).as_deref(), Some("7.2"));
        assert_eq!(of("QEMU emulator version 10.0.2").as_deref(), Some("10.0"));
        assert_eq!((of("kvm: not found"), of("QEMU emulator version ?")), (None, None));
    }
}
