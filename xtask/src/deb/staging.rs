//! Copies each file to its path in the package.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;
use xtask::{command, workspace};

use super::control::About;
use super::package::{BENCH, Package};
use crate::man;

const UNITS: &str = "usr/lib/systemd/system";

/// Files that are copied unchanged from the workspace into the service's package.
const FILES: &[(&str, &str)] = &[
    ("packaging/bareblk.service", UNITS),
    ("packaging/bareblk@.service", UNITS),
    ("packaging/bareblk@.socket", UNITS),
    ("packaging/bareblk-disk@.socket", UNITS),
    ("packaging/bareblk-exporter.service", UNITS),
    ("packaging/bareblk.toml", "etc/bareblk"),
    ("packaging/alerts.yml", "usr/share/bareblk"),
    ("packaging/grafana.json", "usr/share/bareblk"),
    ("README.md", "usr/share/doc/bareblk"),
    ("SECURITY.md", "usr/share/doc/bareblk"),
    ("docs/examples/bareblk.toml", "usr/share/doc/bareblk/examples"),
];
/// The folders of `docs/` that are meant for users.
const DOCUMENTS: [&str; 3] = ["tutorial", "how-to", "reference"];
/// Documents about parts that are not in the package.
const OF_LIBRARIES: [&str; 2] = ["qspinlock", "driver-in-c"];
/// A shell, and the path where it looks for completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/bareblk"),
    ("zsh", "usr/share/zsh/vendor-completions/_bareblk"),
    ("fish", "usr/share/fish/vendor_completions.d/bareblk.fish"),
];

/// Stages all files of the package in a folder that is removed when the result is dropped.
pub(crate) fn stage(package: &Package, programs: &Path, about: &About) -> Result<TempDir> {
    let staged = tempfile::tempdir()?;
    let (root, program) = (staged.path(), programs.join(package.name));
    let doc = root.join("usr/share/doc").join(package.name);
    fs::set_permissions(root, fs::Permissions::from_mode(0o755))?;
    for name in package.programs {
        install_program(&programs.join(name), &root.join("usr/bin"))?;
    }
    man::write_commands(&program, &root.join("usr/share/man/man1"))?;
    if package.has_service {
        service(programs, root)?;
    }
    documents(package, &doc.join("docs"))?;
    write(&doc.join("copyright"), &copyright()?)?;
    write(&doc.join("changelog"), &read("CHANGELOG.md")?)?;
    write(&doc.join("changelog.Debian"), &about.changelog()?)?;
    compress(root)?;
    set_modes(root)?;
    Ok(staged)
}

/// Stages units, configuration and its page, user, and completions for the commands of all programs.
fn service(programs: &Path, root: &Path) -> Result<()> {
    for (from, folder) in FILES {
        copy(Path::new(from), &root.join(folder))?;
    }
    write(&root.join("usr/lib/sysusers.d/bareblk.conf"), &read("packaging/bareblk.sysusers")?)?;
    for (shell, path) in COMPLETIONS {
        let mut completions = Command::new(programs.join(BENCH.name));
        write(&root.join(path), &command::output(completions.args(["completions", shell]))?)?;
    }
    man::write_config(&root.join("usr/share/man/man5"))
}

fn install_program(program: &Path, folder: &Path) -> Result<()> {
    let to = folder.join(program.file_name().unwrap_or_default());
    fs::create_dir_all(folder)?;
    fs::copy(program, &to).with_context(|| format!("cannot copy {}", program.display()))?;
    command::output(Command::new("strip").args(["--strip-unneeded", "--remove-section=.comment"]).arg(&to))?;
    Ok(())
}

fn documents(package: &Package, to: &Path) -> Result<()> {
    let begins = |name: &str, of: &[&str]| of.iter().any(|begin| name.starts_with(begin));
    let is_its = |name: &str| match package.documents {
        [] => !begins(name, &OF_LIBRARIES) && !begins(name, BENCH.documents),
        its => begins(name, its),
    };
    for folder in DOCUMENTS {
        let pages = workspace::root().join("docs").join(folder);
        for entry in fs::read_dir(&pages).with_context(|| format!("cannot read {}", pages.display()))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.ends_with(".md") && is_its(&name) {
                copy(&path, &to.join(folder))?;
            }
        }
    }
    Ok(())
}

/// The package's copyright file, with the licence's full text from the workspace.
fn copyright() -> Result<String> {
    let licence = read("LICENSE-MIT")?;
    let terms = licence.lines().skip_while(|line| !line.starts_with("Permission"));
    let indented = terms.map(|line| if line.is_empty() { " .\n".to_owned() } else { format!(" {line}\n") });
    Ok(read("packaging/debian/copyright")? + &indented.collect::<String>())
}

fn read(path: &str) -> Result<String> {
    let path = workspace::root().join(path);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// `from` is an absolute path, or a path in the workspace.
fn copy(from: &Path, folder: &Path) -> Result<()> {
    let from = workspace::root().join(from);
    let name = from.file_name().with_context(|| format!("{} is not a file", from.display()))?;
    fs::create_dir_all(folder)?;
    fs::copy(&from, folder.join(name)).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(path.parent().context("the file's path has no folder")?)?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Compresses manual pages and changelogs, as Debian requires (policy 12.1, 12.7).
fn compress(root: &Path) -> Result<()> {
    let pages = "gzip -9n usr/share/man/man?/* usr/share/doc/*/changelog usr/share/doc/*/changelog.Debian";
    command::output(Command::new("sh").args(["-c", pages]).current_dir(root)).map(drop)
}

/// Sets modes independently of the umask.
fn set_modes(root: &Path) -> Result<()> {
    let modes =
        "find . -type d -exec chmod 755 {} + && find . -type f -exec chmod 644 {} + && chmod 755 usr/bin/*";
    command::output(Command::new("sh").args(["-c", modes]).current_dir(root)).map(drop)
}

/// Sets the time of all staged files.
pub(crate) fn set_times(root: &Path, time_s: u64) -> Result<()> {
    let script = format!("find . -exec touch -h -d @{time_s} {{}} +");
    command::output(Command::new("sh").args(["-c", &script]).current_dir(root)).map(drop)
}
