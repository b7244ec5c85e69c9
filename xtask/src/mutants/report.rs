//! A run's results: for the terminal, as JSON, and as the table in docs.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::check::{Judged, Verdict};
use super::mutant::Mutant;
use super::survivors::{Kind, Survivor};

#[derive(Serialize)]
struct Results<'a> {
    source_sha256: &'a str,
    mutants: &'a [Judged],
}

#[derive(Deserialize)]
struct Earlier {
    source_sha256: String,
    mutants: Vec<EarlierOne>,
}

#[derive(Deserialize)]
struct EarlierOne {
    name: String,
    verdict: Verdict,
}

/// A digest of everything that can change a verdict.
pub(super) fn digest(folder: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    for inner in ["src", "tests"] {
        add(&mut hash, &folder.join(inner))?;
    }
    Ok(hash.finalize().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

fn add(hash: &mut Sha256, folder: &Path) -> Result<()> {
    let mut paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            add(hash, &path)?;
        } else {
            hash.update(path.to_string_lossy().as_bytes());
            hash.update(fs::read(&path)?);
        }
    }
    Ok(())
}

/// The results of an earlier run on the same source.
pub(super) fn earlier(place: &Path, digest: &str) -> Result<Vec<(String, Verdict)>> {
    let Ok(text) = fs::read_to_string(place.join("results.json")) else { return Ok(Vec::new()) };
    let earlier: Earlier = serde_json::from_str(&text)?;
    if earlier.source_sha256 != digest {
        return Ok(Vec::new());
    }
    Ok(earlier.mutants.into_iter().map(|one| (one.name, one.verdict)).collect())
}

pub(super) fn keep(place: &Path, digest: &str, judged: &[Judged]) -> Result<()> {
    let results = Results { source_sha256: digest, mutants: judged };
    fs::write(place.join("results.json"), serde_json::to_string_pretty(&results)? + "\n")?;
    Ok(())
}

/// How many mutants each check noticed.
pub(super) fn summary(judged: &[Judged]) -> String {
    let count = |name: &str| judged.iter().filter(|one| one.verdict.short() == name).count();
    let by = ["compiler", "tests", "loom", "Miri"].map(|name| format!("{} by {name}", count(name)));
    format!("{} mutants, noticed: {}; {} survived", judged.len(), by.join(", "), count("SURVIVED"))
}

/// The table in docs.
pub(super) fn markdown(judged: &[Judged], explained: &[Survivor]) -> String {
    let mut text = format!(
        "# Which check notices a weakened lock\n\n\
         Each row is a mutant: an ordering that was weakened, a wake or a re-check that was removed, or a bug that another\n\
         lock had. `cargo xtask mutants` writes this page.\n\n\
         {}.\n\n\
         Checks run in this order, and the table names the first that fails: compiler, loom (models), tests, Miri (16 seeds).\n\n\
         | place | what | noticed by |\n|---|---|---|\n",
        summary(judged)
    );
    for Judged { mutant, verdict } in judged {
        let _ = writeln!(
            text,
            "| `{}` | {} | {} |",
            mutant.place,
            what(mutant),
            noticed_by(mutant, verdict, explained)
        );
    }
    text
}

fn what(mutant: &Mutant) -> String {
    let text = if mutant.by_hand { format!("{}: {}", mutant.name, mutant.what) } else { mutant.what.clone() };
    text.replace("->", "→").replace('|', "\\|")
}

fn noticed_by(mutant: &Mutant, verdict: &Verdict, explained: &[Survivor]) -> String {
    match verdict {
        Verdict::Noticed { check, how } => format!("{check}: {how}").replace('|', "\\|"),
        Verdict::Survived => match explained.iter().find(|one| one.mutant == mutant.name) {
            Some(Survivor { kind: Kind::Equivalent, why, .. }) => {
                format!("no check (equivalent to the original): {why}")
            }
            Some(Survivor { kind: Kind::BlindSpot, why, .. }) => format!("no check (a blind spot): {why}"),
            None => "**no check, unexplained**".to_owned(),
        },
    }
}
