//! `cargo xtask release`: makes all files of a release in one folder. It sets no tag and publishes nothing.
//!
//! `clean tree → versions agree → programs → Debian packages, source archive, SBOM → SHA256SUMS → table`
//!
//! - The same commit always gives the same source archive, SBOM and package contents.
//! - `--check` makes nothing. It checks versions and sonames, and runs `cargo publish --dry-run` for the published
//!   crates.
//!
//! `check.rs`: the checks. `changelog.rs`: the headings of CHANGELOG.md. `sbom.rs`: the bill of materials.

mod changelog;
mod check;
mod sbom;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use xtask::{command, workspace};

use crate::deb;
use crate::deb::program::{self, Profile};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder for the release [default: target/release-VERSION]
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    out: Option<PathBuf>,
    /// Only check that versions agree and that the published crates can be published
    #[arg(long)]
    check: bool,
    /// Package the programs of this folder instead of building them
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    programs: Option<PathBuf>,
    /// Maintainer of the packages
    #[arg(long, value_name = "NAME <MAIL>", conflicts_with = "check")]
    maintainer: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.check {
        return check::all();
    }
    require_clean_tree()?;
    check::versions()?;
    let version = env!("CARGO_PKG_VERSION");
    let out = match &args.out {
        Some(out) => out.clone(),
        None => workspace::build_dir()?.join(format!("release-{version}")),
    };
    require_empty(&out)?;
    let programs = match &args.programs {
        Some(folder) => folder.clone(),
        None => program::build(Profile::Release)?,
    };
    let mut files = deb::make(&programs, &out, args.maintainer.as_deref())?;
    files.push(source_archive(&out, version)?);
    files.push(bill_of_materials(&out, version)?);
    files.push(checksums(&out, &files)?);
    print!("{}", table(&out, &files)?);
    Ok(())
}

/// Fails if a file differs from the commit: a release must contain exactly what is committed.
fn require_clean_tree() -> Result<()> {
    let changed =
        command::output(Command::new("git").args(["status", "--porcelain"]).current_dir(workspace::root()))?;
    match changed.lines().next() {
        None => Ok(()),
        Some(first) => bail!(
            "the working tree differs from the commit in {} files (the first: `{}`): commit or remove them",
            changed.lines().count(),
            first.trim()
        ),
    }
}

/// Fails if the folder is not empty: files of an earlier release would seem to belong to this one.
fn require_empty(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    match fs::read_dir(folder)?.next() {
        None => Ok(()),
        Some(_) => {
            bail!("the folder {} is not empty: remove it, or choose another with --out", folder.display())
        }
    }
}

/// Makes an archive of the commit's files, with the commit's time.
fn source_archive(out: &Path, version: &str) -> Result<PathBuf> {
    let path = out.join(format!("bareblk-{version}.tar.gz"));
    let mut git = Command::new("git");
    git.args(["archive", "--format=tar.gz", "-9"]).arg(format!("--prefix=bareblk-{version}/"));
    command::output(git.arg("--output").arg(&path).arg("HEAD").current_dir(workspace::root()))?;
    Ok(path)
}

fn bill_of_materials(out: &Path, version: &str) -> Result<PathBuf> {
    let path = out.join(format!("bareblk-{version}.cdx.json"));
    let text = serde_json::to_string_pretty(&sbom::of(&program::CRATES)?)? + "\n";
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Writes the checksums, for `sha256sum --check`.
fn checksums(out: &Path, files: &[PathBuf]) -> Result<PathBuf> {
    let names = files.iter().filter_map(|file| file.file_name());
    let text = command::output(Command::new("sha256sum").args(names).current_dir(out))?;
    let path = out.join("SHA256SUMS");
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// A table of the files with their sizes and purposes.
fn table(out: &Path, files: &[PathBuf]) -> Result<String> {
    let mut text = format!("{}\n", out.display());
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let kib = fs::metadata(file)?.len().div_ceil(1024);
        text += &format!("  {name:<36} {kib:>8} KiB  {}\n", purpose(&name));
    }
    Ok(text)
}

fn purpose(name: &str) -> &'static str {
    match name {
        _ if name.starts_with("bareblk-bench_") => "Debian package: the measuring program",
        _ if name.ends_with(".deb") => "Debian package: the server",
        _ if name.ends_with(".tar.gz") => "the sources",
        _ if name.ends_with(".cdx.json") => "bill of materials (CycloneDX): the crates in all programs",
        _ => "for `sha256sum --check`",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_packed_the_same_each_time_with_their_version_in_front() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let archive = |folder: &Path| fs::read(source_archive(folder, "1.2.3").unwrap()).unwrap();
        let bytes = archive(first.path());
        assert!(bytes == archive(second.path()));
        let mut tar = Command::new("tar");
        tar.arg("-tzf").arg(first.path().join("bareblk-1.2.3.tar.gz"));
        let names = command::output(&mut tar).unwrap();
        assert!(names.contains("bareblk-1.2.3/Cargo.lock\n"), "{names}");
        assert!(names.lines().all(|name| name.starts_with("bareblk-1.2.3/")), "{names}");
    }

    #[test]
    fn checksums_are_those_of_the_files_by_their_names() {
        let out = tempfile::tempdir().unwrap();
        let file = out.path().join("a.deb");
        fs::write(&file, "a").unwrap();
        let sums = checksums(out.path(), std::slice::from_ref(&file)).unwrap();
        let check = |text: &str| {
            fs::write(&file, text).unwrap();
            let mut sha256sum = Command::new("sha256sum");
            command::output(sha256sum.args(["--check", "--quiet"]).arg(&sums).current_dir(out.path()))
        };
        check("a").unwrap();
        check("b").unwrap_err();
    }

    #[test]
    fn folder_with_an_older_release_is_refused() {
        let out = tempfile::tempdir().unwrap();
        require_empty(out.path()).unwrap();
        fs::write(out.path().join("SHA256SUMS"), "").unwrap();
        let error = require_empty(out.path()).unwrap_err().to_string();
        assert!(error.contains("not empty") && error.contains("--out"), "{error}");
    }

    #[test]
    fn table_names_each_file_with_its_size() {
        let out = tempfile::tempdir().unwrap();
        let file = out.path().join("bareblk-bench_1_amd64.deb");
        fs::write(&file, vec![0; 1025]).unwrap();
        let text = table(out.path(), &[file]).unwrap();
        assert!(
            text.contains("bareblk-bench_1_amd64.deb")
                && text.contains(" 2 KiB  Debian package: the measuring program"),
            "{text}"
        );
    }
}
