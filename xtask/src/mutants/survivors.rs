//! Known survivors, and the reasons: `survivors.toml`.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::check::{Judged, Verdict};

/// Relative to the repository. Read at run time, not built in, because people edit it while they look at the
/// results.
pub(super) const FILE: &str = "xtask/src/mutants/survivors.toml";

#[derive(Debug, Deserialize)]
struct List {
    #[serde(default)]
    survivor: Vec<Survivor>,
}

/// An explained survivor.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Survivor {
    pub(super) mutant: String,
    pub(super) kind: Kind,
    pub(super) why: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// Nothing can go wrong: the original is stricter than necessary, for clarity or speed.
    Equivalent,
    /// Something can go wrong that no check sees.
    BlindSpot,
}

pub(super) fn read(text: &str) -> Result<Vec<Survivor>> {
    let list: List = toml::from_str(text).context(FILE)?;
    Ok(list.survivor)
}

/// Survivors without a reason, and reasons without a survivor, among the mutants that ran.
pub(super) fn complaints(judged: &[Judged], explained: &[Survivor]) -> Vec<String> {
    let is_explained = |name: &str| explained.iter().any(|one| one.mutant == name);
    let complaint = |one: &Judged| {
        let name = &one.mutant.name;
        match &one.verdict {
            Verdict::Survived if !is_explained(name) => {
                Some(format!("survived, and {FILE} does not say why: {name}"))
            }
            Verdict::Noticed { check, how } if is_explained(name) => {
                Some(format!("{FILE} explains why it survives, but {check} noticed it ({how}): {name}"))
            }
            _ => None,
        }
    };
    judged.iter().filter_map(complaint).collect()
}
