//! Where a guest's kernel comes from: QEMU loads it, or firmware reads it from a disk of Blockmux.

use super::boot;
use super::host::Host;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// What loads the kernel of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelSource {
    /// QEMU itself.
    Qemu,
    /// SeaBIOS, from a vhost-user disk.
    VhostUser,
    /// iPXE, from an iSCSI logical unit.
    Iscsi,
    /// iPXE, from an AoE disk.
    Aoe,
}

impl KernelSource {
    pub(crate) fn of(script: &str) -> KernelSource {
        let named = NAMED.iter().find(|(prefix, _)| script.starts_with(prefix));
        named.map_or(KernelSource::Qemu, |(_, source)| *source)
    }

    /// Whether the firmware reads a disk of Blockmux.
    pub(crate) fn is_disk(self) -> bool {
        self != KernelSource::Qemu
    }

    /// Whether that firmware is iPXE, which is part of the network card.
    pub(crate) fn is_network(self) -> bool {
        matches!(self, KernelSource::Iscsi | KernelSource::Aoe)
    }

    /// A program or a file that this machine lacks for it, with its Debian package.
    pub(crate) fn missing(self) -> Option<(&'static str, &'static str)> {
        let boot_loader = boot::missing().filter(|_| self.is_disk()).map(|file| (file, "grub-pc-bin"));
        let has_firmware = !self.is_network() || Path::new(IPXE).exists();
        boot_loader.or_else(|| (!has_firmware).then_some((IPXE, "ipxe-qemu")))
    }

    /// Serves the disk `disk.img` of the test's directory as the firmware reads it, and writes what
    /// iPXE does, which is what `serve --verbose` prints.
    ///
    /// # Errors
    /// If it cannot be served.
    pub(crate) fn serve(self, host: &mut Host) -> Result<()> {
        let requests: &[&str] = match self {
            KernelSource::Qemu => &[],
            KernelSource::VhostUser => {
                &["start disk blockmux attach file:disk.img --socket disk", "until disk by vhost-user"]
            }
            KernelSource::Iscsi => {
                write_iscsi_config(host.directory())?;
                &[
                    "start disk blockmux serve --verbose --config blockmux.toml --iscsi $HOST:3260 >served",
                    SERVED,
                    "run (echo '#!ipxe'; sed -n 's/^ *iPXE> //p' served) >boot.ipxe",
                    // A person would enter it.
                    "run sed -i \"s/read password/set password $(cat secret)/\" boot.ipxe",
                ]
            }
            KernelSource::Aoe => &[
                "run ip link set $TAP mtu 9000 up",
                "start disk blockmux serve --verbose file:disk.img --aoe $TAP --aoe-shelf 7 >served",
                SERVED,
                // iPXE sends AoE through the interface that was opened last.
                "run (echo '#!ipxe'; echo ifopen net2; sed -n 's/^ *iPXE> //p' served) >boot.ipxe",
            ],
        };
        let mut served = requests.iter().map(|request| host.execute(request));
        ensure!(served.all(|status| status == 0), "the disk to boot from is not served");
        Ok(())
    }
}

/// Writes the config of a target that one initiator reaches with a secret, and whose LUN is not 0:
/// iPXE has to use everything that `serve --verbose` prints for it.
fn write_iscsi_config(directory: &Path) -> Result<()> {
    let secret = directory.join("secret");
    fs::write(&secret, "the-secret-of-the-guest").context("the secret")?;
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).context("the secret")?;
    let config = "\
        [[volume]]\n\
        name = 'root'\n\
        spec = 'file:disk.img'\n\
        [[iscsi_target]]\n\
        TargetName = 'iqn.2026-11.test:boot'\n\
        luns = { 10 = 'root' }\n\
        [[iscsi_target.acl]]\n\
        InitiatorName = 'iqn.2026-11.test:guest'\n\
        CHAP_N = 'guest'\n\
        secret_file = 'secret'\n";
    fs::write(directory.join("blockmux.toml"), config).context("the config")
}

/// Prefixes of the names of scripts whose guests do not get their kernel from QEMU.
const NAMED: &[(&str, KernelSource)] = &[
    ("vhost-user-boot", KernelSource::VhostUser),
    ("ipxe-iscsi", KernelSource::Iscsi),
    ("ipxe-aoe", KernelSource::Aoe),
];
/// Request that ends when `serve` has printed that it is ready.
const SERVED: &str = "run until grep -qx ready served; do sleep 0.1; done";
/// iPXE for QEMU's network cards of virtio.
const IPXE: &str = "/usr/lib/ipxe/qemu/efi-virtio.rom";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_script_says_what_loads_its_kernel() {
        assert_eq!(KernelSource::of("ipxe-aoe.sh"), KernelSource::Aoe);
        assert_eq!(KernelSource::of("vhost-user-boot.sh"), KernelSource::VhostUser);
        assert_eq!(KernelSource::of("vhost-user.sh"), KernelSource::Qemu);
        assert!(KernelSource::of("ipxe-iscsi.sh").is_network());
    }
}
