//! `bareblk engines`: what this host supports, what it lacks and why, and what `auto` chooses for an image.
//!
//! `each engine → make one → yes | no, why`; with an image: `→ give it the image`, then what `auto` says
//!
//! It writes nothing and takes no lock, so it also works for an image that is being served.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use disk_image::{Access, Alignment, CacheMode, FileKind, HostOpener, OpenRequest, Opener};
use io_engine::{
    Capability, EngineConfig, EngineError, EngineKind, FileSpec, choose, io_uring_capabilities, make,
};
use serde::Serialize;

use crate::args::values::cache_mode;

/// The longest name in the table.
const NAME_WIDTH: usize = "fixed buffers (pinned guest memory)".len();

#[derive(Debug, Args)]
pub struct EnginesArgs {
    /// Also show which engines can serve this image, and which one `--engine auto` picks
    pub image: Option<std::path::PathBuf>,

    /// The cache mode in which the image would be served
    #[arg(long, value_name = "MODE", default_value = "none", value_parser = cache_mode(), requires = "image")]
    pub cache: CacheMode,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    engines: Vec<EngineLine>,
    io_uring: Vec<FeatureLine>,
    image: Option<ImageLine>,
}

#[derive(Debug, Serialize)]
struct EngineLine {
    engine: &'static str,
    available: bool,
    detail: String,
}

#[derive(Debug, Serialize)]
struct FeatureLine {
    feature: &'static str,
    available: bool,
    detail: String,
}

#[derive(Debug, Serialize)]
struct ImageLine {
    image: String,
    cache: &'static str,
    auto: Option<&'static str>,
    why: String,
    chosen_in_us: u128,
}

/// The text to print.
pub fn text(args: &EnginesArgs) -> Result<String> {
    let report = report(args)?;
    if args.json {
        let json = serde_json::to_string_pretty(&report).context("cannot write JSON")?;
        return Ok(json + "\n");
    }
    Ok(table(&report))
}

fn report(args: &EnginesArgs) -> Result<Report> {
    let file = args.image.as_deref().map(|path| open(path, args.cache)).transpose()?;
    let engines = EngineKind::ALL.map(|kind| engine_line(kind, file.as_ref()));
    let image =
        args.image.as_deref().zip(file.as_ref()).map(|(path, file)| image_line(path, file, args.cache));
    let feature = |Capability { name, available, detail }| FeatureLine { feature: name, available, detail };
    let io_uring = io_uring_capabilities().into_iter().map(feature).collect();
    Ok(Report { engines: engines.into(), io_uring, image })
}

fn open(path: &Path, cache: CacheMode) -> Result<FileSpec> {
    let cannot = || format!("image {} cannot be opened", path.display());
    let instead = if cache.starts_writethrough() { CacheMode::Writethrough } else { CacheMode::Writeback };
    let hint = |error: &io::Error| match error.kind() {
        io::ErrorKind::InvalidInput if cache.is_direct() => {
            format!(
                " with O_DIRECT (--cache {cache}), because its file system refuses O_DIRECT: use --cache {instead}"
            )
        }
        _ => String::new(),
    };
    let kind = FileKind::from(std::fs::metadata(path).with_context(cannot)?.file_type());
    if !matches!(kind, FileKind::Regular | FileKind::BlockDevice) {
        bail!("image {} is a {kind}: give a raw image file or a block device", path.display());
    }
    let direct = cache.is_direct();
    let request = OpenRequest { access: Access::ReadOnly, direct, create: None, exclusive: false };
    let file = HostOpener.open_image(path, &request);
    let file = file.map_err(|error| {
        let line = cannot() + &hint(&error);
        anyhow::Error::from(error).context(line)
    })?;
    // This only tries the engine; no request is submitted.
    Ok(FileSpec::of_file(Arc::new(file.into()), Alignment::BUFFERED))
}

fn engine_line(kind: EngineKind, file: Option<&FileSpec>) -> EngineLine {
    let config = EngineConfig::default();
    let made = match kind {
        EngineKind::Rbd => {
            rbd_client::Library::load().map_err(io::Error::other).and_then(|_| make(kind, &config))
        }
        _ => make(kind, &config),
    };
    let outcome = match (made, file) {
        (Ok(engine), None) => Ok(engine.describe()),
        (Err(error), _) => Err(error.to_string()),
        (Ok(_), Some(file)) => takes(kind, file, &config),
    };
    let (engine, available) = (kind.name(), outcome.is_ok());
    let detail = outcome.unwrap_or_else(|why| why);
    // The engine's own description begins with its name, which the table already shows.
    let detail = detail.strip_prefix(&format!("{engine}: ")).unwrap_or(&detail).to_owned();
    EngineLine { engine, available, detail }
}

fn takes(kind: EngineKind, file: &FileSpec, config: &EngineConfig) -> Result<String, String> {
    match choose(Some(&kind.into()), file, config) {
        Ok(_) => Ok("can serve the image".to_owned()),
        Err(EngineError::Named { source, .. }) => Err(source.to_string()),
        Err(other) => Err(format!("{:#}", anyhow::Error::from(other))),
    }
}

fn image_line(path: &Path, file: &FileSpec, cache: CacheMode) -> ImageLine {
    let started = Instant::now();
    let chosen = choose(None, file, &EngineConfig::default());
    let chosen_in_us = started.elapsed().as_micros();
    let (auto, why) = match chosen {
        Ok(chosen) => (Some(chosen.kind().name()), chosen.why.to_owned()),
        Err(error) => (None, format!("{:#}", anyhow::Error::from(error))),
    };
    ImageLine { image: path.display().to_string(), cache: cache.name(), auto, why, chosen_in_us }
}

fn table(report: &Report) -> String {
    let engines = report.engines.iter().map(|line| row(line.engine, line.available, &line.detail));
    let features = report.io_uring.iter().map(|line| row(line.feature, line.available, &line.detail));
    let engines = format!("Engines:\n{}", engines.collect::<String>());
    let features = format!("\nio_uring in detail:\n{}", features.collect::<String>());
    engines + &features + &report.image.as_ref().map(image_text).unwrap_or_default()
}

fn row(name: &str, available: bool, detail: &str) -> String {
    let mark = if available { "yes" } else { "no" };
    format!("  {name:<NAME_WIDTH$} {mark:<4} {detail}\n")
}

fn image_text(line: &ImageLine) -> String {
    let ImageLine { image, cache, auto, why, chosen_in_us } = line;
    let auto = auto.unwrap_or("nothing");
    format!(
        "\n{image}, --cache {cache}:\n  --engine auto picks {auto}: {why} (chosen in {chosen_in_us} µs)\n"
    )
}
