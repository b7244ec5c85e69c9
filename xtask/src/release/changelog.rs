//! Checks the headings of CHANGELOG.md: the newest release must agree with the workspace's version.

use anyhow::{Result, bail};

/// The first heading, for changes that are not released yet.
const UNRELEASED: &str = "Unreleased";
/// The lists below a release's heading, in this order.
const LISTS: [&str; 3] = ["Added", "Changed", "Fixed"];

/// The heading at the top of the changelog.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Top {
    /// Changes of a version that is not released yet.
    Unreleased,
    /// This version.
    Released,
}

/// Compares the headings with `version`, the version to be released.
///
/// # Errors
/// The headings disagree with `version`, or a list has an unknown name.
pub(super) fn check(text: &str, version: &str) -> Result<Top> {
    if let Some(other) = headings(text, "### ").find(|name| !LISTS.contains(name)) {
        bail!("CHANGELOG.md: the list `{other}` is not one of {}", LISTS.join(", "));
    }
    // `## 0.1.0 (2026-12-01)`
    let mut releases = headings(text, "## ").filter_map(|heading| heading.split_whitespace().next());
    match releases.next() {
        None => bail!("CHANGELOG.md has neither a heading `## {UNRELEASED}` nor the heading of a release"),
        Some(UNRELEASED) if releases.any(|release| release == version) => bail!(
            "CHANGELOG.md says that {version} is already released, but also lists unreleased changes: \
             raise the version in Cargo.toml"
        ),
        Some(UNRELEASED) => Ok(Top::Unreleased),
        Some(release) if release == version => Ok(Top::Released),
        Some(release) => {
            bail!("CHANGELOG.md's newest release is {release}, but Cargo.toml's version is {version}")
        }
    }
}

fn headings<'t>(text: &'t str, mark: &'static str) -> impl Iterator<Item = &'t str> {
    text.lines().filter_map(move |line| line.strip_prefix(mark)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELEASED: &str = "# Changelog\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n- a\n\n## 0.1.0\n";

    #[test]
    fn newest_release_is_the_workspaces_version() {
        assert_eq!(check(RELEASED, "0.2.0").unwrap(), Top::Released);
        let error = check(RELEASED, "0.3.0").unwrap_err().to_string();
        assert!(error.contains("0.2.0") && error.contains("0.3.0"), "{error}");
    }

    #[test]
    fn unreleased_changes_need_a_version_that_is_not_released() {
        let text = RELEASED.replace("## 0.2.0 (2026-12-01)", "## Unreleased");
        assert_eq!(check(&text, "0.2.0").unwrap(), Top::Unreleased);
        assert!(check(&text, "0.1.0").unwrap_err().to_string().contains("raise the version"));
        assert!(check("# Changelog\n", "0.1.0").is_err());
    }

    #[test]
    fn list_of_another_name_is_refused() {
        let error = check(&RELEASED.replace("Added", "Improved"), "0.2.0").unwrap_err().to_string();
        assert!(error.contains("`Improved`"), "{error}");
    }
}
