//! Short names of servers, made from the paths of their sockets.

use std::path::Path;

use bareblk::client::plain;

/// A name for each server: its socket's file name without the extension if all of these differ, else the path.
pub fn labels(paths: &[&Path]) -> Vec<String> {
    let name = |path: &&Path| plain(&path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy());
    let names: Vec<String> = paths.iter().map(name).collect();
    let is_unique = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
    if names.iter().all(is_unique) {
        return names;
    }
    paths.iter().map(|path| shown(path)).collect()
}

/// A path, with characters escaped that a terminal would interpret.
pub fn shown(path: &Path) -> String {
    plain(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(paths: &[&str]) -> Vec<String> {
        labels(&paths.iter().map(Path::new).collect::<Vec<_>>())
    }

    #[test]
    fn servers_have_short_names_if_these_differ() {
        assert_eq!(named(&["/run/a.sock", "/run/b.sock"]), ["a", "b"]);
        assert_eq!(named(&["/x/c.sock", "/y/c.sock"]), ["/x/c.sock", "/y/c.sock"]);
        assert_eq!(named(&["/x/\u{1b}.s", "/y/c.s"]), ["\\u{1b}", "c"]);
    }
}
