//! Finds the disk that a client means: by its name, or by the last parts of its name or of its image's path.
//!
//! `root.raw → /images/vm1/root.raw`, if no other disk's name or image ends like this.
//!
//! The default name of a disk is its image's whole path, because a live upgrade compares names
//! (docs/decisions/0053-names-of-disks.md). Clients therefore need a shorter form, which `short` shows them.

use std::collections::HashMap;
use std::path::Path;

use super::protocol::answer::{ErrorKind, Fault};

/// Maximum number of names that an error lists.
const SHOWN_NAMES: usize = 8;

/// A served disk.
#[derive(Clone, Debug)]
pub struct KnownDisk {
    pub name: String,
    /// The image's path, with links resolved.
    pub image: String,
}

/// The name of the disk that `wanted` means.
pub fn resolve(wanted: &str, disks: &[KnownDisk]) -> Result<String, Fault> {
    if disks.iter().any(|disk| disk.name == wanted) {
        return Ok(wanted.to_owned());
    }
    let found: Vec<&str> =
        disks.iter().filter(|disk| is_meant(wanted, disk)).map(|disk| disk.name.as_str()).collect();
    let shown: String = wanted.escape_debug().collect();
    match found.as_slice() {
        [name] => Ok((*name).to_owned()),
        [] => {
            let names: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
            let known = if names.is_empty() { "the server has no disks" } else { "the disks are " };
            Err(no_disk(format!("there is no disk `{shown}`: {known}{}", list(&names))))
        }
        several => Err(no_disk(format!(
            "`{shown}` matches several disks: give more of the path; they are {}",
            list(several)
        ))),
    }
}

fn no_disk(message: String) -> Fault {
    Fault::new(ErrorKind::NoDisk, message)
}

fn is_meant(wanted: &str, disk: &KnownDisk) -> bool {
    let wanted = wanted.strip_prefix("./").unwrap_or(wanted);
    // An empty path is the end of every path.
    let ends = |path: &str| !wanted.is_empty() && Path::new(path).ends_with(wanted);
    ends(&disk.name) || ends(&disk.image)
}

/// "`a`, `b` and 3 more".
fn list(names: &[&str]) -> String {
    let shown: Vec<String> =
        names.iter().take(SHOWN_NAMES).map(|name| format!("`{}`", name.escape_debug())).collect();
    match names.len().saturating_sub(SHOWN_NAMES) {
        0 => shown.join(", "),
        more => format!("{} and {more} more (see bareblk ctl list)", shown.join(", ")),
    }
}

/// For each disk without a name of its own: its image's file name, if this name matches no other disk.
pub fn short(disks: &[KnownDisk]) -> HashMap<String, String> {
    let unnamed = disks.iter().filter(|disk| disk.name == disk.image);
    let file_name = |disk: &KnownDisk| Some(Path::new(&disk.image).file_name()?.to_str()?.to_owned());
    let mut meant: HashMap<String, usize> = HashMap::new();
    for disk in disks {
        let image = file_name(disk);
        image.clone().into_iter().for_each(|word| *meant.entry(word).or_default() += 1);
        let name = Path::new(&disk.name).file_name().and_then(|name| name.to_str());
        name.filter(|name| Some(*name) != image.as_deref())
            .into_iter()
            .for_each(|word| *meant.entry(word.to_owned()).or_default() += 1);
    }
    let only = |disk: &KnownDisk| file_name(disk).filter(|word| meant.get(word) == Some(&1));
    unnamed.filter_map(|disk| Some((disk.name.clone(), only(disk)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disks(disks: &[(&str, &str)]) -> Vec<KnownDisk> {
        let disk = |(name, image): &(&str, &str)| KnownDisk { name: (*name).into(), image: (*image).into() };
        disks.iter().map(disk).collect()
    }

    /// Two disks with equal file names, and one with a name of its own.
    fn three() -> Vec<KnownDisk> {
        disks(&[
            ("/images/vm1/root.raw", "/images/vm1/root.raw"),
            ("/images/vm2/root.raw", "/images/vm2/root.raw"),
            ("data", "/images/vm2/data.raw"),
        ])
    }

    #[test]
    fn disk_is_found_by_its_name_its_image_and_the_end_of_both() {
        for (wanted, name) in [
            ("data", "data"),
            ("data.raw", "data"),
            ("./data.raw", "data"),
            ("/images/vm2/data.raw", "data"),
            ("vm1/root.raw", "/images/vm1/root.raw"),
            ("/images/vm2/root.raw", "/images/vm2/root.raw"),
        ] {
            assert_eq!(resolve(wanted, &three()).as_deref(), Ok(name), "{wanted}");
        }
    }

    #[test]
    fn exact_name_goes_before_the_end_of_a_path() {
        let disks = disks(&[("root.raw", "/a/x"), ("/b/root.raw", "/b/root.raw")]);
        assert_eq!(resolve("root.raw", &disks).as_deref(), Ok("root.raw"));
    }

    #[test]
    fn part_of_a_file_name_and_an_empty_name_mean_no_disk() {
        for wanted in ["oot.raw", "m1/root.raw", "", ".", "/"] {
            assert!(resolve(wanted, &three()).unwrap_err().message.contains("there is no disk"), "{wanted}");
        }
    }

    #[test]
    fn end_of_two_paths_is_refused_with_both() {
        let fault = resolve("root.raw", &three()).unwrap_err();
        assert_eq!(fault.kind, ErrorKind::NoDisk);
        let ends = "they are `/images/vm1/root.raw`, `/images/vm2/root.raw`";
        assert!(fault.message.ends_with(ends), "{}", fault.message);
    }

    #[test]
    fn unknown_disk_is_answered_with_some_of_those_that_exist() {
        let message = |disks: &[KnownDisk]| resolve("x\n", disks).unwrap_err().message;
        assert_eq!(message(&[]), r"there is no disk `x\n`: the server has no disks");
        assert!(
            message(&three())
                .ends_with("the disks are `/images/vm1/root.raw`, `/images/vm2/root.raw`, `data`")
        );
        let many: Vec<_> =
            (0..100).map(|n| KnownDisk { name: format!("d{n}"), image: "/i".into() }).collect();
        assert!(message(&many).ends_with("`d7` and 92 more (see bareblk ctl list)"), "{}", message(&many));
    }

    #[test]
    fn file_name_stands_for_a_path_only_if_it_is_found_again() {
        assert_eq!(short(&three()), HashMap::new());
        let alone = disks(&[("/a/root.raw", "/a/root.raw"), ("data", "/a/data.raw")]);
        assert_eq!(short(&alone), HashMap::from([("/a/root.raw".into(), "root.raw".into())]));
        let named_alike = disks(&[("/a/root.raw", "/a/root.raw"), ("vm/root.raw", "/b/x")]);
        assert_eq!(short(&named_alike), HashMap::new());
        for (name, word) in short(&alone) {
            assert_eq!(resolve(&word, &alone), Ok(name));
        }
    }
}
