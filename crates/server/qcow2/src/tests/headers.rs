//! Headers that tests write by hand: each field out of its range, and extensions.

use crate::{Compression, Header};

/// The fixed fields of a header that is accepted, to be changed by tests. `after`: bytes that follow them.
#[derive(Clone, Debug)]
pub struct Fields {
    pub version: u32,
    pub backing: (u64, u32),
    pub cluster_bits: u32,
    pub size: u64,
    pub crypt_method: u32,
    pub l1: (u64, u32),
    pub refcounts: (u64, u32),
    pub snapshots: (u64, u32),
    pub incompatible: u64,
    pub compatible: u64,
    pub autoclear: u64,
    pub refcount_order: u32,
    pub header_length: u32,
    pub after: Vec<u8>,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            version: 3,
            backing: (0, 0),
            cluster_bits: 16,
            size: 1 << 30,
            crypt_method: 0,
            l1: (3 << 16, 4),
            refcounts: (1 << 16, 1),
            snapshots: (0, 0),
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            header_length: 112,
            after: Vec::new(),
        }
    }
}

impl Fields {
    /// The bytes of a whole first cluster of 64 KiB.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = [
            &0x5146_49fb_u32.to_be_bytes()[..],
            &self.version.to_be_bytes(),
            &self.backing.0.to_be_bytes(),
            &self.backing.1.to_be_bytes(),
            &self.cluster_bits.to_be_bytes(),
            &self.size.to_be_bytes(),
            &self.crypt_method.to_be_bytes(),
            &self.l1.1.to_be_bytes(),
            &self.l1.0.to_be_bytes(),
            &self.refcounts.0.to_be_bytes(),
            &self.refcounts.1.to_be_bytes(),
            &self.snapshots.1.to_be_bytes(),
            &self.snapshots.0.to_be_bytes(),
        ]
        .concat();
        if self.version >= 3 {
            let features =
                [self.incompatible, self.compatible, self.autoclear].map(u64::to_be_bytes).concat();
            let rest = [self.refcount_order, self.header_length].map(u32::to_be_bytes).concat();
            bytes.extend([features, rest].concat());
        }
        bytes.extend(&self.after);
        bytes.resize(1 << 16, 0);
        bytes
    }

    fn parse(&self) -> Result<Header, String> {
        Header::parse(&self.bytes()).map_err(|error| error.to_string())
    }
}

fn with(change: impl FnOnce(&mut Fields)) -> Result<Header, String> {
    let mut fields = Fields::default();
    change(&mut fields);
    fields.parse()
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Fields), expected: &str) {
    assert_eq!(with(change).map(|_| ()), Err(expected.to_owned()));
}

#[test]
fn usual_header_is_accepted() {
    let header = Fields::default().parse().unwrap();
    assert_eq!((header.size_bytes, header.l1.count, header.header_bytes), (1 << 30, 4, 112));
    assert_eq!(header.compression, Compression::Zlib);
}

#[test]
fn fields_out_of_range_are_named_with_value_and_limit() {
    refused(|f| f.version = 1, "version is 1, allowed is 2 to 3");
    refused(|f| f.version = 4, "version is 4, allowed is 2 to 3");
    refused(|f| f.cluster_bits = 8, "cluster_bits is 8, allowed is 9 to 21");
    refused(|f| f.cluster_bits = 22, "cluster_bits is 22, allowed is 9 to 21");
    refused(|f| f.size = 1 << 63, "size is 9223372036854775808, allowed is at most 9223372036854775807");
    refused(|f| f.size = (2 << 30) + 1, "l1_size is 4, allowed is 5 to 4194304");
    refused(|f| f.l1.1 = 1, "l1_size is 1, allowed is 2 to 4194304");
    refused(|f| f.l1.1 = 4_194_305, "l1_size is 4194305, allowed is 2 to 4194304");
    refused(|f| f.l1.0 = 0, "l1_table_offset is 0, allowed is a multiple of 65536 above 0");
    refused(|f| f.l1.0 = 512, "l1_table_offset is 512, allowed is a multiple of 65536 above 0");
    let high = "l1_table_offset is 9223372036854775808, allowed is at most 9223372036854775775";
    refused(|f| f.l1.0 = 1 << 63, high);
    refused(|f| f.refcounts.0 = 1, "refcount_table_offset is 1, allowed is a multiple of 65536 above 0");
    refused(|f| f.refcounts.1 = 0, "refcount_table_clusters is 0, allowed is 1 to 128");
    refused(|f| f.refcounts.1 = 129, "refcount_table_clusters is 129, allowed is 1 to 128");
    refused(|f| f.snapshots = (1 << 16, 65_537), "nb_snapshots is 65537, allowed is at most 65536");
    refused(|f| f.snapshots = (9, 1), "snapshots_offset is 9, allowed is a multiple of 65536 above 0");
    refused(|f| f.refcount_order = 7, "refcount_order is 7, allowed is at most 6");
    refused(|f| f.header_length = 96, "header_length is 96, allowed is 104 to 65536");
    refused(|f| f.header_length = 105, "header_length is 105, allowed is a multiple of 8");
    refused(|f| f.header_length = 65_544, "header_length is 65544, allowed is 104 to 65536");
}

#[test]
fn encrypted_images_are_refused_by_name() {
    let method =
        |method| format!("crypt_method is {method}, allowed is 0: encrypted images are not supported");
    refused(|f| f.crypt_method = 1, &method("1 (AES)"));
    refused(|f| f.crypt_method = 2, &method("2 (LUKS)"));
    refused(|f| f.crypt_method = 3, "crypt_method is 3, allowed is at most 2");
}

#[test]
fn features_must_fit_to_each_other() {
    let only_large = "cluster_bits is 13, allowed is 14 to 21 with extended L2 entries";
    refused(|f| (f.incompatible, f.cluster_bits, f.size, f.l1) = (1 << 4, 13, 0, (1 << 16, 0)), only_large);
    let zlib = "compression_type is 1, allowed is 0 (zlib) without the feature 'compression type'";
    refused(|f| f.after = vec![1], zlib);
    let zstd = |value| {
        format!("compression_type is {value}, allowed is 1 (zstd) with the feature 'compression type'")
    };
    refused(|f| f.incompatible = 1 << 3, &zstd(0));
    refused(|f| (f.incompatible, f.after) = (1 << 3, vec![2]), &zstd(2));
    // A header that ends before the field does not have it.
    let short = |f: &mut Fields| (f.incompatible, f.header_length) = (1 << 3, 104);
    refused(short, &zstd(0));
    refused(
        |f| f.autoclear = 1,
        "autoclear_features is 1, allowed is bit 0 only with the header extension 'bitmaps'",
    );
    refused(|f| f.autoclear = 2, "autoclear_features is 2, allowed is bit 1 only with an external data file");
    refused(
        |f| (f.incompatible, f.snapshots) = (1 << 2, (1 << 16, 1)),
        "nb_snapshots is 1, allowed is at most 0",
    );
    let zstd = with(|f| (f.incompatible, f.after) = (1 << 3, vec![1])).unwrap();
    assert_eq!(zstd.compression, Compression::Zstd);
    let flags = with(|f| (f.incompatible, f.compatible, f.autoclear) = (3, 5, 4)).unwrap();
    assert!(flags.incompatible.dirty && flags.incompatible.corrupt && flags.compatible.lazy_refcounts);
    assert_eq!((flags.compatible.unknown, flags.autoclear.unknown), (4, 4));
}

pub fn extension(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = [&kind.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// A header with extensions.
fn extended(extensions: &[Vec<u8>]) -> Fields {
    Fields { after: [vec![vec![0; 8]], extensions.to_vec()].concat().concat(), ..Fields::default() }
}

const FORMAT: u32 = 0xe279_2aca;
const FEATURES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const DATA_FILE: u32 = 0x4441_5441;

#[test]
fn unknown_incompatible_features_are_refused_by_the_names_that_the_image_gives() {
    let mut name = [0; 48];
    name[1] = 63;
    name[2..9].copy_from_slice(b"tele\nxx");
    let fields = Fields { incompatible: (1 << 63) | (1 << 5), ..extended(&[extension(FEATURES, &name)]) };
    let expected = "incompatible features that this program does not know: 5, 63 ('tele\\nxx')";
    assert_eq!(fields.parse().map(|_| ()), Err(expected.to_owned()));
}

#[test]
fn extensions_are_read_and_unknown_ones_kept() {
    let bitmaps =
        [&2_u32.to_be_bytes()[..], &[0; 4], &64_u64.to_be_bytes(), &(1_u64 << 20).to_be_bytes()].concat();
    let fields = extended(&[
        extension(7, b"abc"),
        extension(FORMAT, b"qcow2"),
        extension(BITMAPS, &bitmaps),
        extension(DATA_FILE, b"data.raw"),
        extension(7, b""),
        extension(0, b""),
        extension(FORMAT, b"not read"),
    ]);
    let extensions = fields.parse().unwrap().extensions;
    assert_eq!(extensions.backing_format.as_deref(), Some("qcow2"));
    assert_eq!(extensions.data_file.as_deref(), Some(&b"data.raw"[..]));
    let bitmaps = extensions.bitmaps.unwrap();
    assert_eq!((bitmaps.count, bitmaps.directory_bytes, bitmaps.directory_offset), (2, 64, 1 << 20));
    let unknown: Vec<_> = extensions.unknown.iter().map(|one| (one.kind, &one.data[..])).collect();
    assert_eq!(unknown, [(7, &b"abc"[..]), (7, &b""[..])]);
}

#[track_caller]
fn extension_refused(kind: u32, data: &[u8], expected: &str) {
    let refused = extended(&[extension(kind, data)]).parse().map(|_| ());
    assert_eq!(refused, Err(format!("header extension {expected}")));
}

#[test]
fn extensions_that_are_not_as_they_should_be_are_refused() {
    extension_refused(FORMAT, &[b'x'; 16], "backing file format: 16 bytes, at most 15 are allowed");
    extension_refused(FORMAT, b"ra w", "backing file format: 'ra w' is not the name of a format");
    extension_refused(FORMAT, b"", "backing file format: '' is not the name of a format");
    extension_refused(FEATURES, &[0; 47], "feature names: 47 bytes, allowed are multiples of 48");
    extension_refused(DATA_FILE, &[b'x'; 1024], "data file name: 1024 bytes, allowed are 1 to 1023");
    extension_refused(DATA_FILE, b"a\0b", "data file name: 'a\\x00b' contains a zero byte");
    extension_refused(BITMAPS, &[0; 23], "bitmaps: 23 bytes, allowed is 24");
    extension_refused(BITMAPS, &[0; 24], "bitmaps: nb_bitmaps is 0, allowed is 1 to 65535");
    let problem = "encryption: present with crypt_method 0, allowed is only 2 (LUKS)";
    extension_refused(0x0537_be77, &[0; 16], problem);
    let twice = extended(&[extension(FORMAT, b"raw"), extension(FORMAT, b"raw")]).parse().map(|_| ());
    assert_eq!(twice, Err("header extension backing file format: present twice, allowed is once".to_owned()));
    let mut long = extension(9, b"");
    long[7] = 200;
    let fields = Fields { backing: (112 + 8 + 16, 1), ..extended(&[long]) };
    let expected = "header extension of an unknown kind: 200 bytes, room is for 16";
    assert_eq!(fields.parse().map(|_| ()), Err(expected.to_owned()));
}

#[test]
fn backing_name_must_be_inside_the_first_cluster() {
    let name = |offset, len| Fields { backing: (offset, len), ..Fields::default() };
    let refused = |offset, len| name(offset, len).parse().map(|_| ()).unwrap_err();
    assert_eq!(refused(111, 5), "backing_file_offset is 111, allowed is 112 to 65536");
    assert_eq!(refused(65_537, 5), "backing_file_offset is 65537, allowed is 112 to 65536");
    assert_eq!(refused(65_532, 5), "backing_file_size is 5, allowed is 1 to 4");
    assert_eq!(refused(200, 0), "backing_file_size is 0, allowed is 1 to 1023");
    assert_eq!(refused(200, 1024), "backing_file_size is 1024, allowed is 1 to 1023");
    assert_eq!(refused(200, 3), "backing file name's byte is 0, allowed is a name without zero bytes");
    let fields = Fields { after: [vec![0; 96], b"a/b\xff".to_vec()].concat(), ..name(200, 4) };
    let backing = fields.parse().unwrap().backing.unwrap();
    assert_eq!((&backing.name[..], backing.name_offset, backing.format), (&b"a/b\xff"[..], 200, None));
}

#[test]
fn header_that_the_file_does_not_have_is_refused() {
    let bytes = Fields::default().bytes();
    for (len, needed) in [(4, 72), (71, 72), (72, 104), (103, 104)] {
        let expected = format!("the header at 0x0 has {needed} bytes, but the file ends at {len:#x}");
        assert_eq!(Header::read(&bytes[..len].to_vec()).map_err(|error| error.to_string()), Err(expected));
    }
    assert_eq!(
        Header::parse(b"").unwrap_err().to_string(),
        "not a qcow2 image: it begins with 0x00000000 instead of 0x514649fb"
    );
}
