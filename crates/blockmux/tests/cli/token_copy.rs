//! Token-based copies over real sockets, on two units of one target.

use crate::daemon::Daemon;
use crate::raw_iscsi::{CHECK_CONDITION, GOOD, RawIscsi};

fn cdb(opcode: u8, action: u8, list_identifier_at: usize, len: u32) -> [u8; 16] {
    let mut cdb = [opcode, action, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    cdb[list_identifier_at + 3] = 7;
    cdb[10..14].copy_from_slice(&len.to_be_bytes());
    cdb
}

/// RECEIVE ROD TOKEN INFORMATION.
fn information(session: &mut RawIscsi) -> Vec<u8> {
    let (status, told) = session.run(&cdb(0x84, 0x07, 2, 1024), &[], 1024);
    assert_eq!(status, GOOD);
    told
}

/// A list of one block device range descriptor, after its length.
fn range(lba: u64, blocks: u32) -> Vec<u8> {
    [&16_u16.to_be_bytes()[..], &lba.to_be_bytes(), &blocks.to_be_bytes(), &[0; 4]].concat()
}

#[test]
fn a_copy_between_two_units_completes_before_its_status_and_tokens_expire() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("blockmux.toml");
    let target = "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:t'\nluns = { 0 = 'a', 1 = 'b' }\n";
    std::fs::write(&config, target).unwrap();
    let config = config.to_str().unwrap();
    let daemon = Daemon::serve(&["a=mem:64m", "b=mem:64m", "--iscsi", "127.0.0.1:0", "--config", config]);
    let mut session = RawIscsi::login(&daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a");
    let data: Vec<u8> = (0..8192).map(|at| (at / 7) as u8).collect();
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 16, 0];
    assert_eq!(session.run(&write, &data, 0).0, GOOD);
    // 16 MiB in total.
    let list = [&[0, 30, 0, 0][..], &[0; 10], &range(0, 32_768)].concat();
    assert_eq!(session.run(&cdb(0x83, 0x10, 6, list.len() as u32), &list, 0).0, GOOD);
    let token = information(&mut session)[38..].to_vec();
    session.lun = 1;
    assert_eq!(session.run(&[0; 6], &[], 0).0, CHECK_CONDITION, "power on");
    let list = [&[2, 0x26, 1][..], &[0; 13], &token, &[0; 6], &range(64, 32_768)].concat();
    assert_eq!(session.run(&cdb(0x83, 0x11, 6, list.len() as u32), &list, 0).0, GOOD);
    let told = information(&mut session);
    assert_eq!((told[5], &told[20..24]), (1, &32_768_u32.to_be_bytes()[..]));
    let (status, copied) = session.run(&[0x28, 0, 0, 0, 0, 64, 0, 0, 16, 0], &[], 8192);
    assert_eq!((status, &copied), (GOOD, &data));
    session.lun = 0;
    assert_eq!(session.run(&write, &data, 0).0, GOOD);
    session.lun = 1;
    let refused = session.run(&cdb(0x83, 0x11, 6, list.len() as u32), &list, 0);
    assert_eq!(refused.0, CHECK_CONDITION, "the blocks have changed");
    // The maximum number of tokens, each for one second; an expired one makes room.
    let list = [&[0, 30, 0, 0, 0, 0, 0, 1][..], &[0; 6], &range(0, 1)].concat();
    let mut populate = || session.run(&cdb(0x83, 0x10, 6, list.len() as u32), &list, 0).0;
    let refused = (0..=128).filter(|_| populate() != GOOD).count();
    assert!(refused <= 1);
    while populate() != GOOD {}
}
