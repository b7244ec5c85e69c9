//! Writes result files, and searches for existing ones.

use std::fs;
use std::path::Path;

use crate::error::LabError;
use crate::result::RunResult;

/// Name of the file in the experiment's folder.
pub(super) const FILE: &str = "result.json";

pub(super) fn to_text(result: &RunResult) -> String {
    // Fails only for maps whose keys are not strings, and a result has no such maps.
    serde_json::to_string_pretty(result).unwrap_or_default() + "\n"
}

/// All results in the subfolders of `folder`, sorted by name.
pub(super) fn read_all(folder: &Path) -> Result<Vec<RunResult>, LabError> {
    let failed = |source| LabError::output(folder, source);
    let mut results = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path().join(FILE);
        let Ok(text) = fs::read_to_string(&path) else { continue };
        results.push(from_text(&text).map_err(|source| LabError::Unreadable { path, source })?);
    }
    results.sort_by(|a, b| a.experiment.name.cmp(&b.experiment.name));
    Ok(results)
}

fn from_text(text: &str) -> serde_json::Result<RunResult> {
    serde_json::from_str(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn result_survives_its_file() {
        let result = example::result();
        assert_eq!(from_text(&to_text(&result)).unwrap(), result);
    }

    #[test]
    fn samples_have_units_and_keep_their_rounds() {
        let json: serde_json::Value = serde_json::from_str(&to_text(&example::result())).unwrap();
        let measure = &json["cells"][1]["measures"][0];
        assert_eq!(measure["unit"], "MB/s");
        assert_eq!(measure["samples"], serde_json::json!([90.0, null, 110.0]));
    }

    #[test]
    fn file_that_is_no_result_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("aio")).unwrap();
        std::fs::write(folder.path().join("aio/result.json"), "{}").unwrap();
        let line = read_all(folder.path()).unwrap_err().to_string();
        assert!(line.contains("aio/result.json") && line.contains("--out"), "{line}");
    }
}
