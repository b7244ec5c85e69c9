//! `bareblk image info`: what a qcow2 image says about itself. Texts of the image may contain anything, so the table
//! escapes control characters.

use std::fmt::Write;
use std::fs::File;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use qcow2::{Image, ReadAt, Snapshot};
use serde::Serialize;

use crate::args::image_args::OneImage;
use crate::command_line;
use crate::ctl::tables::{plain, size, table};
use crate::image::open::open;

#[derive(Debug, Serialize)]
struct Info {
    image: String,
    format: &'static str,
    version: u32,
    size_bytes: u64,
    file_bytes: u64,
    cluster_bytes: u64,
    subcluster_bytes: u64,
    refcount_bits: u32,
    compression: &'static str,
    extended_l2: bool,
    lazy_refcounts: bool,
    dirty: bool,
    corrupt: bool,
    backing: Option<Backing>,
    data_file: Option<DataFile>,
    bitmaps: u32,
    unknown_extensions: usize,
    snapshots: Vec<SnapshotLine>,
}

#[derive(Debug, Serialize)]
struct Backing {
    name: String,
    format: Option<String>,
}

#[derive(Debug, Serialize)]
struct DataFile {
    name: Option<String>,
    raw: bool,
}

#[derive(Debug, Serialize)]
struct SnapshotLine {
    id: String,
    name: String,
    taken_s: u32,
    vm_state_bytes: u64,
    size_bytes: Option<u64>,
}

/// Prints the image's properties.
pub fn run(args: &OneImage) -> Result<ExitCode> {
    let image = open(&args.path)?;
    let info = info(&args.path, &image).with_context(|| format!("image {}", args.path.display()))?;
    if args.json {
        let json = serde_json::to_string_pretty(&info).context("cannot write JSON")?;
        command_line::print(&(json + "\n"))?;
    } else {
        command_line::print(&text(&info))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn info(path: &Path, image: &Image<File>) -> Result<Info> {
    let (header, geometry) = (image.header(), image.header().geometry);
    let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let backing = header
        .backing
        .as_ref()
        .map(|backing| Backing { name: name(&backing.name), format: backing.format.clone() });
    let data_file = header.incompatible.external_data_file.then(|| DataFile {
        name: header.extensions.data_file.as_deref().map(name),
        raw: header.autoclear.raw_external_data,
    });
    let snapshots = image.snapshots().map(|one| one.map(snapshot)).collect::<Result<_, _>>()?;
    Ok(Info {
        image: path.display().to_string(),
        format: "qcow2",
        version: geometry.version(),
        size_bytes: header.size_bytes,
        file_bytes: image.file().len_bytes()?,
        cluster_bytes: geometry.cluster_bytes(),
        subcluster_bytes: 1 << geometry.subcluster_bits(),
        refcount_bits: geometry.refcount_bits(),
        compression: header.compression.name(),
        extended_l2: geometry.has_extended_l2(),
        lazy_refcounts: header.compatible.lazy_refcounts,
        dirty: header.incompatible.dirty,
        corrupt: header.incompatible.corrupt,
        backing,
        data_file,
        bitmaps: header.extensions.bitmaps.map_or(0, |bitmaps| bitmaps.count),
        unknown_extensions: header.extensions.unknown.len(),
        snapshots,
    })
}

fn snapshot(snapshot: Snapshot) -> SnapshotLine {
    let Snapshot { id, name, taken_s, vm_state_bytes, size_bytes, .. } = snapshot;
    SnapshotLine { id, name, taken_s, vm_state_bytes, size_bytes }
}

fn text(info: &Info) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| _ = writeln!(text, "{name:<16}{value}");
    row("image", &plain(&info.image));
    row("format", &format!("{}, version {}", info.format, info.version));
    row("size", &size(info.size_bytes));
    row("file", &size(info.file_bytes));
    row("cluster size", &size(info.cluster_bytes));
    if info.extended_l2 {
        row("subcluster size", &size(info.subcluster_bytes));
    }
    row(
        "refcounts",
        &format!("{} bits{}", info.refcount_bits, if info.lazy_refcounts { ", lazy" } else { "" }),
    );
    row("compression", info.compression);
    if let Some(Backing { name, format }) = &info.backing {
        let format = format.as_deref().unwrap_or("format not named");
        row("backing file", &format!("{} ({})", plain(name), plain(format)));
    }
    if let Some(DataFile { name, raw }) = &info.data_file {
        let name = name.as_deref().unwrap_or("not named");
        row("data file", &format!("{}{}", plain(name), if *raw { " (raw)" } else { "" }));
    }
    if info.bitmaps > 0 {
        row("bitmaps", &info.bitmaps.to_string());
    }
    if info.dirty {
        row("dirty", "reference counts may be wrong: the image must be repaired before it is written");
    }
    if info.corrupt {
        row("corrupt", "the image can only be read");
    }
    if !info.snapshots.is_empty() {
        text += "\n";
        text += &snapshots(&info.snapshots);
    }
    text
}

fn snapshots(snapshots: &[SnapshotLine]) -> String {
    let row = |one: &SnapshotLine| {
        let disk = one.size_bytes.map_or_else(|| "–".to_owned(), size);
        vec![plain(&one.id), plain(&one.name), disk, size(one.vm_state_bytes), one.taken_s.to_string()]
    };
    table(&["ID", "SNAPSHOT", "SIZE", "VM STATE", "TAKEN (UNIX TIME)"], 2, snapshots.iter().map(row))
}
