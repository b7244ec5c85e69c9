//! Backing files: what is read through them, and which chains are refused.

use std::path::Path;

use crate::{ChainError, FormatError, MAX_LAYERS};
use fastrand::Rng;

use crate::tests::rig::{Bed, bed, random_writes};

fn overlay(bed: &Bed, name: &str, backing: &str, format: &str, options: &str, size: &str) {
    let line = ["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, "-o", options, name, size];
    bed.img_ok(&line);
}

#[test]
fn layers_of_all_kinds_and_sizes_read_as_in_qemu() {
    let Some(bed) = bed() else { return };
    let mut rng = Rng::with_seed(1);
    std::fs::write(bed.path("base.raw"), vec![7; (3 << 20) + 512]).unwrap();
    overlay(&bed, "a.qcow2", "base.raw", "raw", "cluster_size=4k", "5M");
    overlay(&bed, "b.qcow2", "a.qcow2", "qcow2", "cluster_size=64k,extended_l2=on", "4M");
    overlay(&bed, "c.qcow2", "b.qcow2", "qcow2", "compat=0.10,cluster_size=512", "6M");
    overlay(&bed, "d.qcow2", "c.qcow2", "qcow2", "cluster_size=2M", "9M");
    for (name, size) in
        [("a.qcow2", 5 << 20), ("b.qcow2", 4 << 20), ("c.qcow2", 6 << 20), ("d.qcow2", 9 << 20)]
    {
        bed.io(name, &random_writes(&mut rng, size, 512, 12));
    }
    for name in ["a.qcow2", "b.qcow2", "c.qcow2", "d.qcow2"] {
        bed.assert_same(name, &mut rng);
    }
    let chain = bed.chain("d.qcow2").unwrap();
    let names: Vec<_> =
        chain.layers().iter().map(|layer| layer.path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names, ["d.qcow2", "c.qcow2", "b.qcow2", "a.qcow2", "base.raw"]);
}

#[test]
fn names_are_relative_to_the_folder_of_their_image() {
    let Some(bed) = bed() else { return };
    std::fs::create_dir(bed.path("deep")).unwrap();
    bed.create("base.qcow2", "", 1 << 20);
    bed.io("base.qcow2", &["write -P 9 0 64k".into()]);
    overlay(&bed, "deep/top.qcow2", "../base.qcow2", "qcow2", "cluster_size=64k", "1M");
    bed.assert_same("deep/top.qcow2", &mut Rng::with_seed(1));
}

fn refusal(bed: &Bed, name: &str) -> String {
    let error = bed.chain(name).unwrap_err();
    let mut text = error.to_string();
    let mut next = std::error::Error::source(&error);
    while let Some(source) = next {
        text += &format!(": {source}");
        next = source.source();
    }
    text.replace(bed.path("").to_str().unwrap(), "")
}

#[test]
fn backing_file_without_a_format_is_refused_with_the_command_that_adds_it() {
    let Some(bed) = bed() else { return };
    bed.create("base.qcow2", "", 1 << 20);
    overlay(&bed, "top.qcow2", "base.qcow2", "qcow2", "cluster_size=64k", "1M");
    // The extension's type becomes an unknown one.
    let mut bytes = std::fs::read(bed.path("top.qcow2")).unwrap();
    let at = bytes.windows(4).position(|word| word == 0xe279_2aca_u32.to_be_bytes()).unwrap();
    bytes[at..at + 4].copy_from_slice(b"\0\0\0\x09");
    std::fs::write(bed.path("top.qcow2"), bytes).unwrap();
    assert_eq!(
        refusal(&bed, "top.qcow2"),
        "image top.qcow2 does not say which format its backing file base.qcow2 has: \
         `qemu-img rebase -u -b base.qcow2 -F FORMAT top.qcow2` adds it"
    );
}

#[test]
fn backing_file_of_another_format_is_refused() {
    let Some(bed) = bed() else { return };
    bed.img_ok(&["create", "-q", "-f", "vmdk", "base.vmdk", "1M"]);
    overlay(&bed, "top.qcow2", "base.vmdk", "vmdk", "cluster_size=64k", "1M");
    assert_eq!(
        refusal(&bed, "top.qcow2"),
        "image top.qcow2 has a backing file of format vmdk, allowed are raw and qcow2"
    );
}

fn rebase(bed: &Bed, name: &str, backing: &str, format: &str) {
    bed.img_ok(&["rebase", "-u", "-f", "qcow2", "-b", backing, "-F", format, name]);
}

#[test]
fn protocols_are_refused() {
    let Some(bed) = bed() else { return };
    bed.create("top.qcow2", "", 1 << 20);
    // The last ones are folders. Found by `cargo xtask fuzz qcow2`: a name relative to "x/." left its folder.
    for name in
        ["nbd://host/disk", "json:{}", "file:base.raw", "nbd:unix:/run/x", ".", "..", "../x/.", "base.raw/"]
    {
        rebase(&bed, "top.qcow2", name, "raw");
        let expected = format!("image top.qcow2 names {name}, allowed are paths of files");
        assert_eq!(refusal(&bed, "top.qcow2"), expected);
    }
}

#[test]
fn name_outside_of_the_allowed_folder_is_refused_by_the_opener() {
    let Some(bed) = bed() else { return };
    bed.create("top.qcow2", "", 1 << 20);
    let (outside, up) = (tempfile::NamedTempFile::new().unwrap(), Path::new(".."));
    std::os::unix::fs::symlink(outside.path(), bed.path("link")).unwrap();
    let relative = up.join(outside.path().file_name().unwrap());
    for name in [outside.path(), &relative, Path::new("link")] {
        rebase(&bed, "top.qcow2", name.to_str().unwrap(), "raw");
        let text = refusal(&bed, "top.qcow2");
        assert!(
            text.ends_with("which image top.qcow2 names, cannot be opened: outside of the allowed folder"),
            "{text}"
        );
    }
}

#[test]
fn loops_are_refused() {
    let Some(bed) = bed() else { return };
    bed.create("a.qcow2", "", 1 << 20);
    rebase(&bed, "a.qcow2", "a.qcow2", "qcow2");
    assert_eq!(refusal(&bed, "a.qcow2"), "image a.qcow2 names a.qcow2, which the chain already contains");
    bed.create("b.qcow2", "", 1 << 20);
    rebase(&bed, "a.qcow2", "b.qcow2", "qcow2");
    // The same file under another name.
    std::fs::hard_link(bed.path("a.qcow2"), bed.path("again.qcow2")).unwrap();
    rebase(&bed, "b.qcow2", "again.qcow2", "qcow2");
    assert_eq!(refusal(&bed, "a.qcow2"), "image b.qcow2 names again.qcow2, which the chain already contains");
}

#[test]
fn sixteen_layers_are_read_and_seventeen_refused() {
    let Some(bed) = bed() else { return };
    bed.create("0.qcow2", "cluster_size=4k", 1 << 20);
    bed.io("0.qcow2", &["write -P 5 0 1M".into()]);
    for layer in 1..=MAX_LAYERS {
        let (name, backing) = (format!("{layer}.qcow2"), format!("{}.qcow2", layer - 1));
        overlay(&bed, &name, &backing, "qcow2", "cluster_size=4k", "1M");
        bed.io(&name, &[format!("write -P {layer} {} 4k", layer * 8192)]);
    }
    bed.assert_same("15.qcow2", &mut Rng::with_seed(1));
    assert_eq!(refusal(&bed, "16.qcow2"), "image 0.qcow2 would be layer 17, allowed are 16");
}

#[test]
fn missing_backing_file_names_the_image_that_wants_it() {
    let Some(bed) = bed() else { return };
    bed.create("top.qcow2", "", 1 << 20);
    rebase(&bed, "top.qcow2", "gone.raw", "raw");
    let text = refusal(&bed, "top.qcow2");
    assert!(
        text.starts_with("gone.raw, which image top.qcow2 names, cannot be opened: No such file"),
        "{text}"
    );
}

#[test]
fn file_that_is_no_qcow2_image_is_refused_with_its_first_bytes() {
    let Some(bed) = bed() else { return };
    std::fs::write(bed.path("disk.raw"), b"\x01\x02\x03\x04").unwrap();
    let error = bed.chain("disk.raw").unwrap_err();
    assert!(
        matches!(error, ChainError::Image { source: FormatError::NotQcow2 { magic: 0x0102_0304 }, .. }),
        "{error:?}"
    );
}
