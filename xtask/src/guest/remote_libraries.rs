//! Empty shells that replace fio's libraries for storage that no guest has: Ceph, Gluster, NBD, RDMA, PMEM.
//!
//! Debian's fio is linked with all of them, and the loader resolves every symbol at each start. Under emulation, that
//! takes most of a second, and the libraries' 80 MB must be unpacked at each boot. See also: other programs' libraries
//! (`initramfs.rs`).

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::command;

/// Names of the libraries, without the version.
const REMOTE: &[&str] =
    &["librados", "librbd", "libgfapi", "libnbd", "libibverbs", "librdmacm", "libpmem", "libpmemblk"];

/// Whether `library` is one that gets a shell.
pub(super) fn is_remote(library: &Path) -> bool {
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    name.split_once(".so").is_some_and(|(name, _)| REMOTE.contains(&name))
}

/// Writes a shell for `library` to `folder`: a library of the same name, with the functions that `programs` call. Each
/// function ends the process.
pub(super) fn write_shell(programs: &[&Path], library: &Path, folder: &Path) -> Result<PathBuf> {
    let mut wanted = BTreeSet::new();
    for program in programs {
        wanted.extend(symbols(program, "--undefined-only")?);
    }
    let there = symbols(library, "--defined-only")?;
    let there: Vec<&str> = there.iter().map(Symbol::name).collect();
    let taken: Vec<&Symbol> = wanted.iter().filter(|symbol| there.contains(&symbol.name())).collect();
    let shell = folder.join(library.file_name().unwrap_or_default());
    let (source, versions) = (shell.with_extension("c"), shell.with_extension("versions"));
    fs::write(&source, source_text(&taken))?;
    fs::write(&versions, versions_text(&taken))?;
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-nostdlib", "-w", &format!("-Wl,-soname,{name}"), "-o"]).arg(&shell);
    cc.arg(&source).arg(format!("-Wl,--version-script={}", versions.display()));
    command::output(&mut cc)?;
    Ok(shell)
}

/// A symbol as `nm` prints it: `name`, `name@VERSION`, `name@@VERSION`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Symbol(String);

impl Symbol {
    fn name(&self) -> &str {
        self.0.split('@').next().unwrap_or_default()
    }

    /// The symbol's version; empty without one.
    fn version(&self) -> &str {
        self.0.rsplit_once('@').map_or("", |(_, version)| version)
    }
}

fn symbols(file: &Path, which: &str) -> Result<Vec<Symbol>> {
    Ok(symbols_of(&command::output(Command::new("nm").args(["--dynamic", which]).arg(file))?))
}

/// The last word of each line. The address that precedes the symbol's kind may be missing.
fn symbols_of(nm: &str) -> Vec<Symbol> {
    nm.lines().filter_map(|line| line.split_whitespace().last()).map(|word| Symbol(word.to_owned())).collect()
}

fn source_text(symbols: &[&Symbol]) -> String {
    let functions =
        symbols.iter().map(|symbol| format!("void {}(void) {{ __builtin_trap(); }}\n", symbol.name()));
    functions.collect()
}

/// The version script for the linker. It defines the versions that the programs need, because the loader warns about a
/// missing version. The linker accepts a part without a name only if it is the only part.
fn versions_text(symbols: &[&Symbol]) -> String {
    let mut versions: Vec<&str> = symbols.iter().map(|symbol| symbol.version()).collect();
    versions.sort_unstable();
    versions.dedup();
    let mut text = String::new();
    for version in versions.into_iter().filter(|version| !version.is_empty()) {
        let names = symbols.iter().filter(|symbol| symbol.version() == version).map(|symbol| symbol.name());
        let _ = writeln!(text, "{version} {{ global: {}; }};", names.collect::<Vec<_>>().join("; "));
    }
    if text.is_empty() { "{ global: *; };\n".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_libraries_of_remote_storage_are_remote() {
        let remote = |name: &str| is_remote(&Path::new("/lib/x86_64-linux-gnu").join(name));
        assert!(remote("librbd.so.1") && remote("libpmem.so.1") && remote("libpmemblk.so.1"));
        assert!(!remote("libaio.so.1") && !remote("libnuma.so.1") && !remote("libpmem2.so.1"));
    }

    #[test]
    fn symbol_has_its_name_and_its_version() {
        let symbols = symbols_of("                 U glfs_close@GFAPI_3.4.0\n0000000000001000 T rbd_open\n");
        let parts: Vec<_> = symbols.iter().map(|symbol| (symbol.name(), symbol.version())).collect();
        assert_eq!(parts, [("glfs_close", "GFAPI_3.4.0"), ("rbd_open", "")]);
    }

    #[test]
    fn versions_are_those_that_the_program_wants() {
        let [one, two, three] = ["a@V1", "b@V2", "c@V1"].map(|text| Symbol(text.to_owned()));
        assert_eq!(versions_text(&[&one, &two, &three]), "V1 { global: a; c; };\nV2 { global: b; };\n");
        assert_eq!(versions_text(&[&Symbol("a".to_owned())]), "{ global: *; };\n");
    }
}
