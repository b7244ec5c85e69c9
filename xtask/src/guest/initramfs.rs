//! The guest's root file system: two cpio archives made once, and a small one with each run's script.
//!
//! `base` boots and runs a shell script (busybox, modules, `/init`); `tools` adds fio and file system tools
//! with their shared libraries. The kernel unpacks archives that follow each other in one file, so a run
//! appends its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::kernel::Kernel;
use super::remote_libraries;
use crate::{command, packages};

/// The guest's first process.
pub(super) const INIT: &str = include_str!("init.sh");

/// The guest's tools besides busybox; they are in `/tools`, first in its PATH.
pub(super) const TOOLS: &[&str] =
    &["fio", "mkfs.ext4", "fsck.ext4", "dumpe2fs", "blkdiscard", "blockdev", "lsblk"];

/// The paths of the programs `names` on this machine.
pub(super) fn programs(names: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let find = |name: &&str| {
        let path = packages::find_program(name);
        let path = path.with_context(|| format!("`{name}` is not installed: run `cargo xtask setup`"))?;
        Ok(((*name).to_owned(), path))
    };
    names.iter().map(find).collect()
}

/// Writes the archive with busybox, the kernel's modules and `/init`.
pub(super) fn write_base(kernel: &Kernel, archive: &Path) -> Result<()> {
    let root = tempfile::tempdir()?;
    let (_, busybox) = programs(&["busybox"])?.swap_remove(0);
    place(&busybox, &root.path().join("bin/busybox"))?;
    for entry in fs::read_dir(kernel.modules())? {
        let path = entry?.path();
        place(&path, &root.path().join("modules").join(path.file_name().unwrap_or_default()))?;
    }
    fs::create_dir_all(root.path().join("etc"))?;
    fs::write(root.path().join("init"), INIT)?;
    make_executable(&root.path().join("init"))?;
    pack(root.path(), archive)
}

/// Writes the archive with fio and file system tools, and with the shared libraries that `ldd` names or their shells
/// (`remote_libraries.rs`).
pub(super) fn write_tools(archive: &Path) -> Result<()> {
    let root = tempfile::tempdir()?;
    let inside = |(name, path)| (path, Path::new("/tools").join(name));
    place_programs(&programs(TOOLS)?.into_iter().map(inside).collect::<Vec<_>>(), root.path())?;
    pack(root.path(), archive)
}

/// Writes an archive with one run's `/script.sh`.
pub(super) fn script_archive(script: &str, archive: &Path) -> Result<()> {
    run_archive(script, &[], &[], archive)
}

/// Writes an archive with one run's `/script.sh`, and programs and files with their paths on this machine and in the
/// guest.
pub(super) fn run_archive(
    script: &str,
    programs: &[(PathBuf, PathBuf)],
    files: &[(PathBuf, PathBuf)],
    archive: &Path,
) -> Result<()> {
    let root = tempfile::tempdir()?;
    fs::write(root.path().join("script.sh"), script)?;
    for (path, inside) in files {
        place(path, &below(root.path(), inside)?)?;
    }
    place_programs(programs, root.path())?;
    pack(root.path(), archive)
}

/// Writes an archive with one empty file.
pub(super) fn mark_archive(name: &str, archive: &Path) -> Result<()> {
    let root = tempfile::tempdir()?;
    let file = root.path().join(name);
    fs::create_dir_all(file.parent().context("the mark's path has no folder")?)?;
    fs::write(&file, "")?;
    pack(root.path(), archive)
}

/// Writes archives one after another into one file.
pub(super) fn join(archives: &[&Path], to: &Path) -> Result<()> {
    let mut file = File::create(to).with_context(|| format!("cannot create {}", to.display()))?;
    for archive in archives {
        let mut part = File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
        std::io::copy(&mut part, &mut file).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

/// Copies each program to its path in the guest, with the shared libraries that it needs.
fn place_programs(programs: &[(PathBuf, PathBuf)], root: &Path) -> Result<()> {
    for (path, inside) in programs {
        place(path, &below(root, inside)?)?;
    }
    let shells = tempfile::tempdir()?;
    let paths: Vec<&Path> = programs.iter().map(|(path, _)| path.as_path()).collect();
    for (inside, library) in libraries_of(&paths, shells.path())? {
        place(&library, &below(root, &inside)?)?;
    }
    Ok(())
}

/// Maps the path where the guest's loader finds each library of `programs` to the file to be copied there: the library,
/// or its shell, which is written to `shells`. Omits libraries that only a library with a shell needs.
fn libraries_of(programs: &[&Path], shells: &Path) -> Result<BTreeMap<PathBuf, PathBuf>> {
    let mut shell_of = BTreeMap::new();
    for library in
        needed_by(programs, None)?.into_iter().filter(|library| remote_libraries::is_remote(library))
    {
        shell_of.insert(remote_libraries::write_shell(programs, &library, shells)?, library);
    }
    let place_of = |file: PathBuf| (shell_of.get(&file).unwrap_or(&file).clone(), file);
    Ok(needed_by(programs, Some(shells))?.into_iter().map(place_of).collect())
}

/// The libraries that `ldd` reports. `ldd` searches `first` before other folders.
fn needed_by(programs: &[&Path], first: Option<&Path>) -> Result<BTreeSet<PathBuf>> {
    let mut libraries = BTreeSet::new();
    for program in programs {
        let mut ldd = Command::new("ldd");
        libraries.extend(shared_libraries(&command::output(
            ldd.arg(program).envs(first.map(|folder| ("LD_LIBRARY_PATH", folder))),
        )?));
    }
    Ok(libraries)
}

fn below(root: &Path, absolute: &Path) -> Result<PathBuf> {
    let inside = absolute.strip_prefix("/");
    Ok(root.join(inside.with_context(|| format!("{} is not an absolute path", absolute.display()))?))
}

/// Parses `name => /path (0x…)` and the loader's `/path (0x…)`; the vdso has no path.
fn shared_libraries(ldd: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let words = line.split_whitespace();
        words.into_iter().find(|word| word.starts_with('/')).map(PathBuf::from)
    };
    ldd.lines().filter_map(path).collect()
}

/// Copies the target of `from`, so that the archive holds no symbolic links.
fn place(from: &Path, to: &Path) -> Result<()> {
    let parent = to.parent().context("the path of a file in the guest has no folder")?;
    fs::create_dir_all(parent)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// Packs everything below `root`, with root as owner.
fn pack(root: &Path, archive: &Path) -> Result<()> {
    let mut names = Vec::new();
    list(root, root, &mut names)?;
    let file = File::create(archive).with_context(|| format!("cannot create {}", archive.display()))?;
    let mut cpio = Command::new("cpio");
    cpio.args(["--create", "--format=newc", "--null", "--quiet", "--reproducible", "--owner=+0:+0"]);
    let cpio = cpio.current_dir(root).stdin(Stdio::piped()).stdout(file).stderr(Stdio::piped());
    let mut child = cpio.spawn().context("cannot start `cpio`")?;
    child.stdin.take().context("cpio has no standard input")?.write_all(&names)?;
    let result = child.wait_with_output()?;
    if !result.status.success() {
        bail!("`cpio` failed ({}): {}", result.status, String::from_utf8_lossy(&result.stderr).trim());
    }
    Ok(())
}

/// Names relative to `root`, each folder before its content, each name ended by NUL.
fn list(root: &Path, dir: &Path, names: &mut Vec<u8>) -> Result<()> {
    let mut paths = fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        names.extend_from_slice(path.strip_prefix(root)?.as_os_str().as_encoded_bytes());
        names.push(0);
        if path.is_dir() {
            list(root, &path, names)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_lines_with_a_path_give_libraries_and_the_vdso_none() {
        let text = "\tlinux-vdso.so.1 (0x00007f83)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(shared_libraries(text), expected);
    }

    #[test]
    fn static_program_has_no_libraries() {
        assert_eq!(shared_libraries("\tnot a dynamic executable\n"), Vec::<PathBuf>::new());
    }

    #[test]
    fn names_list_folders_before_their_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        fs::write(dir.path().join("b/c"), "").unwrap();
        fs::write(dir.path().join("a"), "").unwrap();
        let mut names = Vec::new();
        list(dir.path(), dir.path(), &mut names).unwrap();
        assert_eq!(names, b"a\0b\0b/c\0");
    }

    #[test]
    fn joined_archives_follow_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two, both] = ["one", "two", "both"].map(|name| dir.path().join(name));
        fs::write(&one, "1").unwrap();
        fs::write(&two, "22").unwrap();
        join(&[&one, &two], &both).unwrap();
        assert_eq!(fs::read(both).unwrap(), b"122");
    }
}
