//! dpkg's metadata: the control file, the list of configuration files, the installation scripts, checksums.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use xtask::{command, packages, workspace};

use super::package::Package;

/// The folder where dpkg expects its metadata.
const FOLDER: &str = "DEBIAN";
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
/// A reserved address (RFC 2606): set a maintainer to build for others.
const NOBODY: &str = "The bareblk developers <bareblk@localhost.invalid>";

/// The data for the control file and the package's file name.
#[derive(Debug)]
pub(crate) struct About {
    package: &'static Package,
    version: String,
    architecture: String,
    depends: String,
    pub(crate) maintainer: String,
    /// The commit's time, so that the same sources give the same package.
    pub(crate) time_s: u64,
}

impl About {
    pub(crate) fn read(package: &'static Package, maintainer: Option<&str>, programs: &Path) -> Result<Self> {
        let architecture = command::output(Command::new("dpkg").arg("--print-architecture"))?;
        Ok(Self {
            package,
            // xtask has the workspace's version; the packaging has no version of its own.
            version: format!("{}-1", env!("CARGO_PKG_VERSION")),
            architecture: architecture.trim().to_owned(),
            depends: libraries(programs, package.programs)?,
            maintainer: maintainer.unwrap_or(NOBODY).to_owned(),
            time_s: commit_time_s(),
        })
    }

    pub(crate) fn file_name(&self) -> String {
        format!("{}_{}_{}.deb", self.package.name, self.version, self.architecture)
    }

    fn control(&self, installed_kib: u64) -> String {
        let Self { package, version, architecture, depends, maintainer, .. } = self;
        let server = if package.needs_server { format!(", bareblk (= {version})") } else { String::new() };
        let Package { name, relations, section, description, .. } = package;
        format!(
            "Package: {name}\nVersion: {version}\nArchitecture: {architecture}\nMaintainer: {maintainer}\n\
             Installed-Size: {installed_kib}\nDepends: {depends}{server}\n{relations}\
             Section: {section}\nPriority: optional\nDescription: {}\n",
            description.join("\n ")
        )
    }

    /// The changelog in Debian's format; the actual changes are in changelog.gz.
    pub(crate) fn changelog(&self) -> Result<String> {
        let (Self { version, maintainer, time_s, .. }, name) = (self, self.package.name);
        let date = format!("@{time_s}");
        let date = command::output(Command::new("date").args(["-u", "-R", "-d", &date]))?;
        let date = date.trim();
        Ok(format!(
            "{name} ({version}) unstable; urgency=medium\n\n  * Built from the sources; see changelog.gz.\n\n -- {maintainer}  {date}\n"
        ))
    }
}

/// The library packages that dpkg finds for the programs `names` in the folder `programs`; without dpkg-shlibdeps,
/// those that every Rust program needs.
fn libraries(programs: &Path, names: &[&str]) -> Result<String> {
    if packages::find_program("dpkg-shlibdeps").is_none() {
        return Ok("libc6, libgcc-s1".to_owned());
    }
    let place = tempfile::tempdir()?;
    fs::create_dir(place.path().join("debian"))?;
    // dpkg-shlibdeps requires a source package.
    fs::write(
        place.path().join("debian/control"),
        "Source: bareblk\n\nPackage: bareblk\nArchitecture: any\n",
    )?;
    let folder = programs.canonicalize().with_context(|| format!("cannot find {}", programs.display()))?;
    let mut asked = Command::new("dpkg-shlibdeps");
    asked.args(["-O", "--ignore-missing-info"]).args(names.iter().map(|name| folder.join(name)));
    let text = command::output(asked.current_dir(place.path()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    Ok(line.context("dpkg-shlibdeps names no libraries")?.to_owned())
}

fn commit_time_s() -> u64 {
    let mut git = Command::new("git");
    let told = command::output(git.args(["log", "-1", "--format=%ct"]).current_dir(workspace::root()));
    // For sources without history any fixed time will do.
    told.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Writes all metadata into the staged package.
pub(crate) fn write(staged: &Path, about: &About) -> Result<()> {
    let kib = command::output(Command::new("du").args(["-sk", "--apparent-size", "."]).current_dir(staged))?;
    let kib = kib.split_whitespace().next().and_then(|kib| kib.parse().ok()).context("du names no size")?;
    let sums = "find . -type f ! -path './etc/*' -printf '%P\\0' | sort -z | xargs -0 md5sum";
    let sums = command::output(Command::new("sh").args(["-c", sums]).current_dir(staged))?;
    let folder = staged.join(FOLDER);
    fs::create_dir(&folder)?;
    fs::write(folder.join("md5sums"), sums)?;
    fs::write(folder.join("control"), about.control(kib))?;
    if !about.package.has_service {
        return Ok(());
    }
    fs::write(folder.join("conffiles"), "/etc/bareblk/bareblk.toml\n")?;
    for script in SCRIPTS {
        let (from, to) = (workspace::root().join("packaging/debian").join(script), folder.join(script));
        fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::super::package::{BENCH, SERVER};

    fn about(package: &'static Package) -> About {
        About {
            package,
            version: "1.2.3-1".into(),
            architecture: "amd64".into(),
            depends: "libc6".into(),
            maintainer: "A B <a@b.c>".into(),
            time_s: 86_400,
        }
    }

    #[test]
    fn control_file_has_a_line_for_each_field_and_an_indented_description() {
        for package in [&SERVER, &BENCH] {
            let text = about(package).control(7);
            let first = format!("Package: {}\nVersion: 1.2.3-1\nArchitecture: amd64\n", package.name);
            assert!(text.starts_with(&first), "{text}");
            let fields = text.lines().filter(|line| !line.starts_with(' '));
            assert!(fields.clone().all(|line| line.contains(": ")), "{text}");
            let indented = text.lines().filter(|line| line.starts_with(' ')).count();
            assert_eq!(indented, package.description.len() - 1, "{text}");
        }
    }

    #[test]
    fn measuring_program_needs_the_server_of_its_version_and_the_server_only_suggests_it() {
        let (server, bench) = (about(&SERVER).control(7), about(&BENCH).control(7));
        assert!(bench.contains("\nDepends: libc6, bareblk (= 1.2.3-1)\n"), "{bench}");
        assert!(
            server.contains("\nDepends: libc6\n")
                && server.contains("\nSuggests: bareblk-bench, libgnutls30, librbd1\n"),
            "{server}"
        );
    }

    #[test]
    fn changelog_has_the_commits_time() {
        let changelog = about(&BENCH).changelog().unwrap();
        assert!(changelog.starts_with("bareblk-bench (1.2.3-1) "), "{changelog}");
        assert!(changelog.ends_with(" -- A B <a@b.c>  Fri, 02 Jan 1970 00:00:00 +0000\n"), "{changelog}");
    }

    #[test]
    fn file_is_named_as_debian_names_files() {
        assert_eq!(about(&SERVER).file_name(), "bareblk_1.2.3-1_amd64.deb");
        assert_eq!(about(&BENCH).file_name(), "bareblk-bench_1.2.3-1_amd64.deb");
    }
}
