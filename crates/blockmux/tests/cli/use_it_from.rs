//! The page that says how to use a daemon from other programs: its commands run, and its files are
//! validated by the programs that they are for.

use crate::api_document::python_program;
use crate::documents::{Place, can_run, failures_with_daemon};
use crate::examples::{Block, Page, pages};
use crate::program::{has, succeed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const PAGE: &str = "docs/guides/use-it-from.md";

/// Programs whose commands need a kernel, a cluster or a service manager of their own.
const ELSEWHERE: [(&str, &str); 6] = [
    ("iscsiadm", "needs a kernel: tests/vm/iscsi.sh"),
    ("echo", "appends to a file of the machine and enables a unit"),
    ("virsh", "needs a daemon of libvirt; what its files say is validated"),
    ("$", "shows output"),
    ("...", "shows output"),
    ("iPXE>", "shows output"),
];

fn page() -> Page {
    pages().into_iter().find(|page| page.name == PAGE).unwrap()
}

/// The blocks of a language that begin with a comment with this name.
fn files<'a>(page: &'a Page, language: &str, name: &str) -> Vec<Block<'a>> {
    let blocks = page.blocks().into_iter();
    let is_it = |block: &Block<'_>| block.language == language && block.lines[0].contains(name);
    let found: Vec<_> = blocks.filter(is_it).collect();
    assert!(!found.is_empty(), "{name} is not on the page");
    found
}

/// Writes a block into a file, for a program that reads it there.
fn written(block: &Block<'_>, directory: &TempDir, name: &str) -> PathBuf {
    let path = directory.path().join(name);
    fs::write(&path, block.lines.join("\n") + "\n").unwrap();
    path
}

#[test]
fn every_command_of_the_page_succeeds_with_its_daemon() {
    if !can_run() {
        return;
    }
    let page = page();
    let place = Place::new();
    place.image("/srv/root.img", 16 << 20);
    place.image("disk.img", 16 << 20);
    let config = files(&page, "toml", "blockmux.toml").remove(0);
    place.write("etc/blockmux/blockmux.toml", config.lines.join("\n").as_bytes(), 0o644);
    let mut commands = Vec::new();
    for block in page.blocks().iter().filter(|block| block.language.is_empty()) {
        for (at, line) in block.lines.iter().enumerate() {
            let program = line.split_whitespace().next().unwrap();
            if ELSEWHERE.iter().any(|(elsewhere, _)| *elsewhere == program) || !has(program) {
                continue;
            }
            // The machine does not start: that QEMU has opened its disk is enough.
            let line = match program {
                "qemu-system-x86_64" => {
                    format!("echo quit | {line} -nodefaults -display none -S -monitor stdio")
                }
                _ => (*line).to_owned(),
            };
            commands.push((format!("{PAGE}:{}", block.line + at), line));
        }
    }
    assert_eq!(failures_with_daemon(&place, &commands), "");
}

#[test]
fn libvirt_accepts_the_disks_and_the_pool() {
    if !has("virt-xml-validate") {
        return;
    }
    let (page, directory) = (page(), tempfile::tempdir().unwrap());
    let pool = written(&files(&page, "xml", "pool.xml")[0], &directory, "pool.xml");
    succeed(Command::new("virt-xml-validate").arg(pool).arg("storagepool"));
    let disks = files(&page, "xml", "disk.xml");
    assert_eq!(disks.len(), 2, "NBD and iSCSI");
    for disk in disks {
        let domain = format!(
            "<domain type='kvm'><name>vm</name><memory>1048576</memory><os><type>hvm</type></os><devices>{}</devices></domain>",
            disk.lines.join("\n")
        );
        let path = directory.path().join("domain.xml");
        fs::write(&path, domain).unwrap();
        succeed(Command::new("virt-xml-validate").arg(path).arg("domain"));
    }
}

#[test]
fn kubernetes_manifests_have_the_fields_of_their_schemas() {
    let Some(validate) = python_program("kubernetes-validate") else { return };
    let (page, directory) = (page(), tempfile::tempdir().unwrap());
    for name in ["iscsi.yaml", "nvme.yaml", "claim.yaml"] {
        let manifest = written(&files(&page, "yaml", name)[0], &directory, name);
        succeed(Command::new(&validate).arg("--strict").arg(manifest));
    }
}

#[test]
fn systemd_makes_mounts_of_the_lines_for_fstab() {
    let generator = "/usr/lib/systemd/system-generators/systemd-fstab-generator";
    if !has("systemd-analyze") || !Path::new(generator).exists() {
        return;
    }
    let (page, directory) = (page(), tempfile::tempdir().unwrap());
    let fstab = written(&files(&page, "text", "/etc/fstab")[0], &directory, "fstab");
    let units = directory.path().join("units");
    fs::create_dir(&units).unwrap();
    succeed(Command::new(generator).args([&units, &units, &units]).env("SYSTEMD_FSTAB", fstab));
    for name in ["nvme", "iscsi", "nbd"] {
        let mount = format!("srv-{name}.mount");
        assert!(units.join("remote-fs.target.wants").join(&mount).exists(), "{mount}: behind the network");
        succeed(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(units.join(&mount)));
    }
    let nbd = fs::read_to_string(units.join("srv-nbd.mount")).unwrap();
    assert!(nbd.contains("\nRequires=nbd@nbd0.service\n"), "{nbd}");
}

#[test]
fn dnsmasq_accepts_the_options_for_ipxe() {
    if !has("dnsmasq") {
        return;
    }
    let (page, directory) = (page(), tempfile::tempdir().unwrap());
    let config = written(&files(&page, "text", "dnsmasq.d")[0], &directory, "boot.conf");
    succeed(Command::new("dnsmasq").arg("--test").arg(format!("--conf-file={}", config.display())));
}
