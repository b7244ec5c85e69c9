//! `bareblk vmm-args`: prints the options that a virtual machine monitor needs, ready to paste.
//!
//! - Guest memory must be shared: the server reads and writes it in place.
//! - The queue size is explicit: the monitors' default of 128 holds few large requests.
//! - QEMU's device is modern only: firmware may drive a transitional one as legacy, which no vhost-user server supports
//!   (docs/how-to/clients.md).
//!
//! Sources: QEMU 7.2 and 10.0 (`-device vhost-user-blk-pci,help`; `reconnect` is in seconds, deprecated since 9.2 in
//! favour of `reconnect-ms`); libvirt's domain format (vhostuser disks since 7.1, `queue_size` since 7.8);
//! cloud-hypervisor's `docs/vhost-user-blk-testing.md`; Firecracker's `docs/api_requests/block-vhost-user.md`; crosvm's
//! book, "Vhost-user devices".

mod disk;
mod qemu_version;

use std::path::Path;

use anyhow::{Result, bail, ensure};
use serde_json::json;

use crate::args::vmm_args::{QemuVersion, Vmm, VmmArgs};
use disk::Disk;

/// The first QEMU with `reconnect-ms`.
const WITH_RECONNECT_MS: QemuVersion = QemuVersion { major: 9, minor: 2 };
/// The memory in the example, if --memory is not given.
const EXAMPLE_MEMORY: u64 = 4 << 30;
/// Firecracker's only queue has this size.
const FIRECRACKER_QUEUE_SIZE: u16 = 256;

/// The text to print, ending with a line break.
pub fn text(args: &VmmArgs) -> Result<String> {
    let memory = args.memory.unwrap_or(EXAMPLE_MEMORY);
    ensure!(
        memory > 0 && memory.is_multiple_of(1 << 20),
        "--memory must be a whole number of MiB, such as 512M"
    );
    let disk = Disk::of(args)?;
    match args.vmm {
        Vmm::Qemu => Ok(qemu(args, &disk, memory)),
        Vmm::Libvirt => Ok(libvirt(args, &disk, memory)),
        Vmm::CloudHypervisor => cloud_hypervisor(args, &disk, memory),
        Vmm::Firecracker => firecracker(args, &disk),
        Vmm::Crosvm => crosvm(args, &disk, memory),
    }
}

/// A line of the comment, if the memory is only an example.
fn about_memory(args: &VmmArgs, comment: &str) -> String {
    let note = "4G is an example: replace it with the size of your guest's memory.";
    if args.memory.is_some() { String::new() } else { format!("{comment}{note}\n") }
}

fn qemu(args: &VmmArgs, disk: &Disk, memory_bytes: u64) -> String {
    let Disk { socket, queues, queue_size: size } = disk;
    let (memory, id) = (memory(memory_bytes), device_id(socket));
    let queues = queues.map(|queues| format!(",num-queues={queues}")).unwrap_or_default();
    let version = args.qemu_version.or_else(qemu_version::installed);
    let reconnect = match version {
        Some(version) if version >= WITH_RECONNECT_MS => "reconnect-ms=1000",
        _ => "reconnect=1",
    };
    let about_version = match (version, args.qemu_version) {
        (Some(_), Some(_)) => String::new(),
        (Some(version), None) => {
            format!("# For QEMU {version}, which is installed here; --qemu-version chooses another.\n")
        }
        (None, _) => {
            "# QEMU 9.2 or newer prefers reconnect-ms=1000 to reconnect=1, which is deprecated: --qemu-version 9.2.\n"
                .into()
        }
    };
    let chardev = format!("socket,id={id},path={},{reconnect}", socket.replace(',', ",,"));
    let (chardev, about_memory) = (shell_word(&chardev), about_memory(args, "# "));
    format!(
        "\
# Add to QEMU's command line. The guest's memory (-m) is given once for all disks; bareblk shares it.
{about_memory}{about_version}\
# QEMU creates one queue per vCPU unless num-queues is given.
# Without disable-legacy=on, firmware such as OVMF uses the disk as a legacy device, and does not boot.
-m {memory} \\
-object memory-backend-memfd,id=bareblk-mem,size={memory},share=on \\
-machine memory-backend=bareblk-mem \\
-chardev {chardev} \\
-device vhost-user-blk-pci,chardev={id},disable-legacy=on,queue-size={size}{queues}
"
    )
}

fn libvirt(args: &VmmArgs, disk: &Disk, memory_bytes: u64) -> String {
    let Disk { socket, queues, queue_size: size } = disk;
    let (memory_mib, target, socket) = (memory_bytes >> 20, &args.target, xml_attribute(socket));
    let queues = queues.map(|queues| format!(" queues='{queues}'")).unwrap_or_default();
    let about_memory = about_memory(args, "     ");
    format!(
        "\
<!-- Put this below domain. QEMU's user must be allowed to connect to the socket: with the options of bareblk serve,
     make that user the socket's owner, or make a group of that user the socket's group, with mode 660.
{about_memory}-->
<memory unit='MiB'>{memory_mib}</memory>
<memoryBacking>
  <source type='memfd'/>
  <access mode='shared'/>
</memoryBacking>

<!-- Put this below devices. -->
<!-- libvirt refuses cache, discard, iotune, readonly and serial for such a disk: cache, discard, readonly and serial
     are settings of the disk in bareblk. -->
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw'{queues} queue_size='{size}'/>
  <source type='unix' path='{socket}'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='{target}' bus='virtio'/>
</disk>
"
    )
}

fn cloud_hypervisor(args: &VmmArgs, disk: &Disk, memory_bytes: u64) -> Result<String> {
    let Disk { socket, queues, queue_size: size } = disk;
    refuse_in_path(socket, &[',', '"', '[', ']'], "cloud-hypervisor")?;
    let (memory, queues, about_memory) =
        (memory(memory_bytes), queues.unwrap_or(1), about_memory(args, "# "));
    let disk = format!("vhost_user=true,socket={socket},num_queues={queues},queue_size={size}");
    let disk = shell_word(&disk);
    Ok(format!(
        "\
# Add to cloud-hypervisor's command line. num_queues must not exceed the guest's number of vCPUs.
{about_memory}# The guest sees a resize only after its next start: cloud-hypervisor does not pass on the server's message.
--memory size={memory},shared=on \\
--disk {disk}
"
    ))
}

/// Firecracker shares the guest's memory by itself when it has a drive with a socket.
fn firecracker(args: &VmmArgs, disk: &Disk) -> Result<String> {
    let Disk { socket, queues, queue_size } = disk;
    if let Some(queues) = queues.filter(|queues| *queues > 1) {
        bail!(
            "--queues {queues} is too high, because Firecracker's drives have one queue: leave the option out"
        );
    }
    // --queue-size requests a size, which the disk of --disk may limit.
    if args.queue_size.is_some_and(|size| size != FIRECRACKER_QUEUE_SIZE)
        || *queue_size < FIRECRACKER_QUEUE_SIZE
    {
        bail!(
            "a queue size of {queue_size} does not fit: Firecracker always uses {FIRECRACKER_QUEUE_SIZE}, which the disk must allow"
        );
    }
    // Firecracker accepts letters, digits and underscores.
    let id: String =
        device_id(socket).chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(64).collect();
    let body = json!({"drive_id": id, "is_root_device": false, "cache_type": "Writeback", "socket": socket});
    let body = shell_word(&body.to_string());
    Ok(format!(
        "\
# Run this before the guest starts. FIRECRACKER_SOCKET stands for Firecracker's API socket.
# Set is_root_device to true if the guest boots from this disk.
# Without \"cache_type\": \"Writeback\" the guest cannot flush, so every write is made durable, which is slow.
# After bareblk ctl resize: curl … -X PATCH http://localhost/drives/{id} -d '{{\"drive_id\": \"{id}\"}}'
# Firecracker does not reconnect: do not restart the server under a guest, upgrade it with bareblk serve --take-over.
curl --unix-socket FIRECRACKER_SOCKET -X PUT http://localhost/drives/{id} \\
  -H 'Content-Type: application/json' \\
  -d {body}
"
    ))
}

fn crosvm(args: &VmmArgs, disk: &Disk, memory_bytes: u64) -> Result<String> {
    let Disk { socket, queues, .. } = disk;
    refuse_in_path(socket, &[',', '"', '[', ']'], "crosvm")?;
    ensure!(
        queues.is_none(),
        "--queues has no effect, because crosvm chooses the number of queues itself: leave the option out"
    );
    let (memory_mib, about_memory) = (memory_bytes >> 20, about_memory(args, "# "));
    let option = shell_word(&format!("block,socket={socket}"));
    Ok(format!(
        "\
# Add to crosvm's command line, after `crosvm run`.
{about_memory}# crosvm does not reconnect: do not restart the server under a guest, upgrade it with bareblk serve --take-over.
--mem {memory_mib} \\
--vhost-user {option}
"
    ))
}

fn refuse_in_path(socket: &str, chars: &[char], vmm: &str) -> Result<()> {
    ensure!(
        !socket.contains(chars),
        "socket {socket}: {vmm} accepts no path with a comma, quote or bracket: choose another path"
    );
    Ok(())
}

/// Formats a size in the largest unit that all monitors know.
fn memory(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 30) { format!("{}G", bytes >> 30) } else { format!("{}M", bytes >> 20) }
}

/// An identifier for QEMU, from the socket's name, so that it differs from disk to disk.
fn device_id(socket: &str) -> String {
    let stem = Path::new(socket).file_stem().unwrap_or_default().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    format!("bareblk-{}", stem.chars().map(plain).collect::<String>())
}

/// Returns the word, quoted if the shell would split it.
fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

fn xml_attribute(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_words_survive_spaces_and_quotes() {
        assert_eq!(shell_word("socket,path=/run/a.sock"), "socket,path=/run/a.sock");
        assert_eq!(shell_word("/a b'c"), r"'/a b'\''c'");
    }

    #[test]
    fn memory_is_in_gibibytes_where_it_is_whole_ones() {
        assert_eq!(memory(4 << 30), "4G");
        assert_eq!(memory(1536 << 20), "1536M");
    }

    #[test]
    fn two_sockets_have_two_identifiers() {
        assert_eq!(device_id("/run/vm 1.sock"), "bareblk-vm_1");
        assert_ne!(device_id("/run/a.sock"), device_id("/run/b.sock"));
    }

    fn args(words: &[&str]) -> VmmArgs {
        use clap::Parser;

        #[derive(Debug, Parser)]
        #[command(no_binary_name = true)]
        struct Line {
            #[command(flatten)]
            args: VmmArgs,
        }
        Line::try_parse_from(words).unwrap().args
    }

    #[test]
    fn commas_are_doubled_for_qemu_and_refused_where_they_separate_options() {
        let of = |vmm| text(&args(&["/run/a,b.sock", "--qemu-version=7.2", "--vmm", vmm]));
        assert!(of("qemu").unwrap().contains("path=/run/a,,b.sock,reconnect=1 "));
        assert!(of("cloud-hypervisor").is_err() && of("crosvm").is_err());
        assert!(of("firecracker").unwrap().contains(r#""socket":"/run/a,b.sock""#));
    }

    #[test]
    fn option_for_reconnecting_is_the_one_that_the_version_knows() {
        let of = |version| text(&args(&["s", "--qemu-version", version])).unwrap();
        assert!(of("7.2").contains(",reconnect=1 ") && of("9.1").contains(",reconnect=1 "));
        assert!(of("9.2").contains(",reconnect-ms=1000 ") && of("10.0").contains(",reconnect-ms=1000 "));
        assert!(!of("10.0").contains("reconnect=1"));
    }

    #[test]
    fn firecracker_has_one_queue_of_its_own_size() {
        let of = |words: &[&str]| text(&args(&[&["/run/vm-1.sock", "--vmm=firecracker"], words].concat()));
        let text = of(&[]).unwrap();
        assert!(
            text.contains("drives/bareblk_vm_1 ") && text.contains(r#""cache_type":"Writeback""#),
            "{text}"
        );
        assert!(of(&["--queues=2"]).is_err() && of(&["--queue-size=128"]).is_err());
        assert!(of(&["--queues=1", "--queue-size=256"]).is_ok());
    }

    #[test]
    fn memory_that_nobody_gave_is_called_an_example() {
        for vmm in ["qemu", "libvirt", "cloud-hypervisor", "crosvm"] {
            let of = |words: &[&str]| text(&args(&[&["s", "--vmm", vmm], words].concat())).unwrap();
            assert!(
                of(&[]).contains("is an example") && !of(&["--memory=4G"]).contains("is an example"),
                "{vmm}"
            );
        }
    }

    #[test]
    fn path_is_escaped_in_xml() {
        assert_eq!(xml_attribute("/a&b<c'd"), "/a&amp;b&lt;c&apos;d");
    }
}
