//! The two packages: their content and dpkg's metadata.

/// A Debian package.
#[derive(Debug)]
pub(crate) struct Package {
    /// The package's name. The program of this name writes the package's manual pages.
    pub(crate) name: &'static str,
    pub(crate) programs: &'static [&'static str],
    /// Whether the package needs the other one in the same version, because each program starts the other.
    pub(crate) needs_server: bool,
    /// Further lines of the control file.
    pub(crate) relations: &'static str,
    pub(crate) section: &'static str,
    /// The synopsis, then the lines of the description.
    pub(crate) description: &'static [&'static str],
    /// Whether the package has the units, their configuration, and the installation scripts.
    pub(crate) has_service: bool,
    /// Prefixes of the names of its pages in docs/. If empty: all pages that belong to no other package.
    pub(crate) documents: &'static [&'static str],
}

pub(crate) const SERVER: Package = Package {
    name: "bareblk",
    programs: &["bareblk", "bareblk-monitor"],
    needs_server: false,
    // Optional: a host that serves guests needs no measuring program.
    relations: "Recommends: systemd\nSuggests: bareblk-bench, libgnutls30, librbd1\n",
    section: "admin",
    description: &[
        "disks for virtual machines, over vhost-user",
        "bareblk serves raw image files and block devices to virtual machines: QEMU and",
        "other monitors connect to its sockets, and it answers the guests' virtio-blk",
        "queues straight from shared memory, with io_uring or another I/O engine.",
    ],
    has_service: true,
    documents: &[],
};

pub(crate) const BENCH: Package = Package {
    name: "bareblk-bench",
    programs: &["bareblk-bench"],
    needs_server: true,
    relations: "Suggests: fio, qemu-system-x86\n",
    section: "utils",
    description: &[
        "benchmarks bareblk and other disks for virtual machines",
        "The program behind `bareblk bench` and `bareblk lab`: it runs fio-style loads on",
        "vhost-user-blk sockets and files, and repeats published experiments.",
    ],
    has_service: false,
    documents: &["bench", "lab", "cli-bench"],
};
