//! `bareblk serve --check`: shows what would be served, or every mistake. Starts, creates and locks nothing.
//!
//! `configuration (the file's mistakes are known by now) → each image and socket → lines, or errors → exit code`

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use disk_image::{HostOpener, Image, ImageError, Inspection, LockHolder, Opener, SECTOR_BYTES};
use io_engine::{EngineKind, FileSpec, choose};

use crate::command_line::{complain, print};
use crate::config::configuration::Configuration;
use crate::config::disk_settings::DiskSettings;
use crate::serving::confined;
use crate::serving::remote_access::RemoteAccess;
use crate::serving::serve::check_workers;

/// Prints what the configuration serves, or one line for each mistake.
pub fn check(configuration: &Configuration) -> Result<ExitCode> {
    let disks: Vec<Result<String>> = configuration.disks.iter().map(disk).collect();
    let process = [process(configuration)].into_iter().filter_map(Result::err);
    let (lines, mistakes): (Vec<_>, Vec<_>) = disks.into_iter().partition(Result::is_ok);
    let mistakes: Vec<anyhow::Error> = process.chain(mistakes.into_iter().filter_map(Result::err)).collect();
    for mistake in &mistakes {
        let _ = complain(&format!("{mistake:#}"), ExitCode::FAILURE);
    }
    if !mistakes.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    let lines: String = lines.into_iter().flatten().collect();
    let (disks, workers) = (configuration.disks.len(), configuration.server.workers.len());
    print(&format!("{lines}valid: {}, {}\n", count(disks, "disk"), count(workers, "worker")))?;
    Ok(ExitCode::SUCCESS)
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

fn process(configuration: &Configuration) -> Result<()> {
    let options = &configuration.server.options;
    confined::check(&options.confinement, options.control.is_some())?;
    check_workers(&configuration.server.workers)?;
    for (option, socket) in [("--control", options.control_socket()), ("--monitor", options.monitor_socket())]
    {
        let checked = socket.map_or(Ok(()), |socket| socket.check(&HostOpener));
        checked.map_err(|error| anyhow!(error).context(option))?;
    }
    Ok(())
}

/// A line about the disk.
fn disk(settings: &DiskSettings) -> Result<String> {
    settings.check_image_path(&HostOpener)?;
    settings.socket.check(&HostOpener)?;
    let name = settings.name(&HostOpener);
    let (image, socket) = (settings.image.path.display(), settings.socket.path.display());
    let begin = format!("disk {name}: {image} on {socket}");
    if settings.is_remote() {
        let image = RemoteAccess::direct().open(&settings.image)?;
        let (size_bytes, block_size_bytes) = (image.capacity_sectors() * SECTOR_BYTES, image.block_size());
        let engine = choose(settings.engine.as_ref(), &FileSpec::of(&image), &settings.engine_config)?.kind();
        return Ok(line(settings, &begin, size_bytes, block_size_bytes, engine, ""));
    }
    if let Some(bytes) = settings.image.create_bytes {
        return Ok(format!("{begin}, would be created with {bytes} bytes\n"));
    }
    if settings.options.is_qcow2() {
        let image = Image::inspect_qcow2(&HostOpener, &settings.image)?;
        let (size_bytes, block_size_bytes) = (image.capacity_sectors() * SECTOR_BYTES, image.block_size());
        let engine = choose(settings.engine.as_ref(), &FileSpec::of(&image), &settings.engine_config)?.kind();
        let layers = image.backing().volume().map_or(0, |volume| volume.layers());
        let format = format!(", qcow2 with {}", count(layers, "layer"));
        return Ok(line(settings, &begin, size_bytes, block_size_bytes, engine, &format));
    }
    let found = Image::inspect(&HostOpener, &settings.image)?;
    if let Some(format) = found.foreign_format.filter(|_| !settings.options.is_known_raw()) {
        return Err(ImageError::ForeignFormat { path: settings.image.path.clone(), format }.into());
    }
    let Inspection { file, id, size_bytes, block_size_bytes, alignment, .. } = found;
    let file = FileSpec::of_file(file, alignment);
    let engine = choose(settings.engine.as_ref(), &file, &settings.engine_config)?.kind();
    let users = users(&HostOpener.lock_holders(id));
    Ok(line(settings, &begin, size_bytes, block_size_bytes, engine, &users))
}

fn line(
    settings: &DiskSettings,
    begin: &str,
    size_bytes: u64,
    block_size_bytes: u32,
    engine: EngineKind,
    users: &str,
) -> String {
    let access = if settings.read_only() { "read-only" } else { "writable" };
    let (cache, queues) = (settings.image.cache, count(usize::from(settings.options.queues), "queue"));
    format!(
        "{begin}, {size_bytes} bytes in blocks of {block_size_bytes}, {access}, cache {cache}, engine {engine}, {queues}{users}\n"
    )
}

fn users(holders: &[LockHolder]) -> String {
    if holders.is_empty() {
        return String::new();
    }
    let holders: Vec<String> = holders.iter().map(ToString::to_string).collect();
    format!("; in use now by {}", holders.join(", "))
}
