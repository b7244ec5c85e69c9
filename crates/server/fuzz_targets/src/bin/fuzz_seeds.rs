//! Writes the seeds of all targets into a directory: `cargo run -p fuzz_targets --bin fuzz_seeds [FOLDER]`, by default
//! `fuzz/seeds`. Keeps seeds that were added by hand.
#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};

fn main() -> io::Result<()> {
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/seeds");
    let folder = std::env::args_os().nth(1).map_or(usual, PathBuf::from);
    for target in fuzz_targets::TARGETS {
        let folder = folder.join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (name, bytes) in (target.seeds)() {
            std::fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
