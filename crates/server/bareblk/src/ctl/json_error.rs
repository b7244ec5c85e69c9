//! Errors of `bareblk ctl --json` that do not come from the server, in the form of the server's errors.

use std::ffi::OsString;

use serde_json::json;

use super::connection::Unreachable;
use super::output::NoDisk;
use crate::args::usage::Wrong;

/// `{"id":null,"error":{"kind":…,"message":…}}`, without a line break. Kinds: `usage`, `unreachable`,
/// `no-disk`, `failed`.
pub fn line(error: &anyhow::Error) -> String {
    let kind = if error.is::<Wrong>() {
        "usage"
    } else if error.is::<Unreachable>() {
        "unreachable"
    } else if error.is::<NoDisk>() {
        "no-disk"
    } else {
        "failed"
    };
    object(kind, &format!("{error:#}"))
}

/// The line about wrong usage in `words`; `None` if these are not arguments of `ctl --json`.
pub fn of_usage(words: impl IntoIterator<Item = OsString>, message: &str) -> Option<String> {
    let words: Vec<OsString> = words.into_iter().collect();
    let is_json =
        words.first().is_some_and(|word| word == "ctl") && words.iter().any(|word| word == "--json");
    is_json.then(|| object("usage", message))
}

fn object(kind: &str, message: &str) -> String {
    json!({"id": null, "error": {"kind": kind, "message": message}}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_usage_is_an_object_only_for_those_who_asked_for_json() {
        let of = |words: &[&str]| of_usage(words.iter().map(OsString::from), "a \"b\"");
        let line = r#"{"error":{"kind":"usage","message":"a \"b\""},"id":null}"#;
        assert_eq!(of(&["ctl", "list", "--json", "--nonsense"]).as_deref(), Some(line));
        assert_eq!((of(&["ctl", "list"]), of(&["bench", "--json"])), (None, None));
    }
}
