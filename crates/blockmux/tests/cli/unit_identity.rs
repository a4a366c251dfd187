//! `[volume.scsi]`: a logical unit with the identifiers that it had elsewhere.

use crate::program::{has, succeed, text};
use crate::raw_iscsi::RawIscsi;
use crate::reload::Configured;
use std::process::Command;

const TARGETS: [&str; 2] = ["iqn.2026-11.test:one", "iqn.2026-11.test:two"];
const INITIATOR: &str = "iqn.2026-11.i:a";
const NAA: &str = "60014055f7a9c1e2b3d4e5f8a6b7c8d9";

/// Two targets with the volume `a`, whose identity is `scsi`, and the volume `b`.
fn config(scsi: &str, more: &str) -> String {
    let target =
        |name: &str| format!("[[iscsi_target]]\nTargetName = '{name}'\nluns = {{ 0 = 'a', 1 = 'b' }}\n");
    format!(
        "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{scsi}\n\
         [[volume]]\nname = 'b'\nspec = 'mem:1m'\n{more}\n{}",
        TARGETS.map(target).concat()
    )
}

/// `iscsi://host:port`
fn portal(served: &Configured) -> String {
    served.daemon.urls_of("iscsi")[0].split('/').take(3).collect::<Vec<_>>().join("/")
}

/// A page of a LUN, without its header.
fn page(served: &Configured, target: &str, lun: u8, page_code: u8) -> Vec<u8> {
    let mut nexus = RawIscsi::login(&format!("{}/{target}/{lun}", portal(served)), INITIATOR);
    nexus.lun = lun;
    nexus.inquiry_page(page_code).split_off(4)
}

fn bytes(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// The NAA designator of a unit, which is its first.
fn naa(served: &Configured, lun: u8) -> Vec<u8> {
    let page = page(served, TARGETS[0], lun, 0x83);
    assert_eq!(page[..3], [1, 3, 0]);
    page[4..4 + usize::from(page[3])].to_vec()
}

#[test]
fn every_target_shows_the_configured_identity_of_a_volume() {
    let scsi = format!(
        "scsi = {{ vendor = 'LIO-ORG', product = 'mail', revision = '4.0', serial = '5f7a', naa = '{NAA}', \
         t10 = 'LIO-ORG mail:5f7a' }}"
    );
    let served = Configured::serve(&config(&scsi, ""));
    let designators = [&[1, 3, 0, 16][..], &bytes(NAA), &[2, 1, 0, 17], b"LIO-ORG mail:5f7a"].concat();
    for target in TARGETS {
        assert_eq!(page(&served, target, 0, 0x80), *b"5f7a");
        let page = page(&served, target, 0, 0x83);
        assert_eq!(page[..designators.len()], designators);
        assert_eq!(page[designators.len()] & 0xf, 1, "the relative port follows");
        assert_eq!(page[designators.len() + 1], 0x94);
    }
    assert_eq!(naa(&served, 1)[0] >> 4, 3, "the other volume has a derived one");
    if !has("iscsi-inq") {
        return;
    }
    let inquire = |args: &[&str]| {
        let url = format!("{}/{}/0", portal(&served), TARGETS[1]);
        succeed(Command::new("iscsi-inq").args(args).arg(url))
    };
    let inquiry = inquire(&[]);
    for line in ["Vendor:LIO-ORG", "Product:mail", "Revision:4.0"] {
        assert!(inquiry.lines().any(|own| own.trim_end() == line), "{line}: {inquiry}");
    }
    assert!(inquire(&["-e", "1", "-c", "128"]).contains("Unit Serial Number:[5f7a]"));
    let designators = inquire(&["-e", "1", "-c", "131"]);
    assert!(designators.contains("LIO-ORG mail:5f7a"), "{designators}");
}

#[test]
fn a_new_identity_waits_for_the_next_start_and_no_other_volume_gets_it_meanwhile() {
    let mut served = Configured::serve(&config(&format!("scsi = {{ naa = '{NAA}' }}"), ""));
    let other = "60014050000000000000000000000001";
    let said = served.said(&["set", "volume", "a", &format!("scsi.naa={other}"), "scsi.serial=4711"]);
    assert!(said.contains("takes effect at the next start:\n"), "{said}");
    assert!(said.contains(&format!("~ volume a: scsi: naa: \"{NAA}\" -> \"{other}\"")), "{said}");
    assert_eq!(naa(&served, 0), bytes(NAA));
    let shown = served.said(&["show", "volume", "a"]);
    assert!(shown.contains(other) && shown.contains("serial = \"4711\""), "{shown}");
    // The identity that `a` still has, and the one that it will have.
    let refused = served.ctl(&["add", "volume", "c", "spec=mem:1m", &format!("scsi.naa={NAA}")]);
    let said = text(&refused.stderr);
    assert!(said.contains("exports the same disk as `a`") && !refused.status.success(), "{said}");
    let refused = served.ctl(&["set", "volume", "b", &format!("scsi.naa={other}")]);
    let said = text(&refused.stderr);
    let expected =
        format!("volumes `a` and `b` have the SCSI naa `{other}`; initiators would treat both as one");
    assert!(said.contains(&expected) && !refused.status.success(), "{said}");
    served.said(&["save"]);
    served = Configured::serve(&served.config_text());
    assert_eq!((naa(&served, 0), page(&served, TARGETS[0], 0, 0x80)), (bytes(other), b"4711".to_vec()));
}
