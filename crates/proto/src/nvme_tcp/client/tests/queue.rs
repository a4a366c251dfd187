//! Data transfer of I/O.

use super::script::*;
use crate::driver::session::{StreamSession, Timed};
use blockmux_volume::{Op, Output, Seg, SgList};
use blockmux_wire::nvme::SglDescriptor;
use blockmux_wire::nvme::opcode::NvmOpcode;
use blockmux_wire::nvmeof::tcp::{Data, FLAG_LAST, FLAG_SUCCESS, PduType};

#[test]
fn reads_are_complete_however_bytes_are_cut() {
    for format in [PLAIN, BOTH] {
        at_every_split(|step| {
            let mut queue = ScriptedQueue::ready(format);
            queue.driver.step = step;
            // One that can borrow the receive buffer, one into its own memory, and a long one that
            // is placed.
            for (tag, len, has_memory) in [(1, 4096, false), (2, 4096, true), (3, 100 << 10, false)] {
                let memory = has_memory.then(|| SgList::one(Seg::from_slice(&vec![0; len])));
                queue.driver.submit(tag, Op::Read, 8192, len as u64, memory);
                let command = queue.command();
                assert_eq!(
                    (command.opcode(), command.range()),
                    (NvmOpcode::READ, (16, (len / 512) as u32, 0))
                );
                assert_eq!(command.sqe().dptr, SglDescriptor::transport(len as u32));
                let data = pattern(len);
                queue.feed(&format.data(command.cid(), 0, &data, FLAG_LAST)).unwrap();
                queue.driver.assert_nothing_done();
                queue.feed(&format.good(command.cid())).unwrap();
                assert!(queue.driver.done_data() == data);
            }
            // Data that has arrived completely is not placed.
            assert_eq!(queue.driver.placed, usize::from(step != usize::MAX));
        });
    }
}

#[test]
fn data_is_accepted_in_any_order_and_with_the_success_flag() {
    let mut queue = ScriptedQueue::ready(PLAIN);
    queue.driver.read(1, 0, 12 << 10);
    let (cid, data) = (queue.command().cid(), pattern(12 << 10));
    for (from, flags) in [(8192, 0), (0, 0)] {
        queue.feed(&PLAIN.data(cid, from, &data[from as usize..][..4096], flags)).unwrap();
    }
    let last = PLAIN.data(cid, 4096, &data[4096..8192], FLAG_LAST | FLAG_SUCCESS);
    queue.feed(&last).unwrap();
    assert!(queue.driver.done_data() == data);
    // The command is complete: its CID is no longer valid.
    assert!(queue.feed(&PLAIN.good(cid)).is_err());
}

#[test]
fn short_writes_are_sent_in_the_capsule() {
    for format in [PLAIN, BOTH] {
        let mut queue = ScriptedQueue::ready(format);
        let data = pattern(8192);
        queue.write(1, 512, &data);
        let command = queue.command();
        assert_eq!((command.opcode(), command.range()), (NvmOpcode::WRITE, (1, 16, 0)));
        assert_eq!(command.sqe().dptr, SglDescriptor::in_capsule(0, 8192));
        assert!(command.data == data);
        queue.feed(&format.good(command.cid())).unwrap();
        assert!(matches!(queue.driver.done(), (1, Ok(Output::Nothing))));
    }
}

#[test]
fn long_writes_are_sent_as_requested() {
    for format in [PLAIN, BOTH] {
        at_every_split(|step| {
            let mut queue = ScriptedQueue::ready(format);
            queue.driver.step = step;
            let data = pattern(16384);
            queue.write(1, 0, &data);
            let command = queue.command();
            assert_eq!((command.sqe().dptr, command.data.len()), (SglDescriptor::transport(16384), 0));
            let mut got = vec![0; 16384];
            for (ttag, from, len) in [(7, 10240, 6144), (8, 0, 10240)] {
                queue.feed(&format.r2t(command.cid(), ttag, from, len)).unwrap();
                let pdus = queue.sent();
                let mut at = from;
                for (index, pdu) in pdus.iter().enumerate() {
                    let head = pdu.as_a::<Data>();
                    assert_eq!(pdu.kind(), PduType::H2C_DATA);
                    assert_eq!((head.ttag.get(), head.datao.get()), (ttag, at));
                    assert!(pdu.data.len() <= 4096);
                    assert_eq!(head.common.flags & FLAG_LAST != 0, index + 1 == pdus.len());
                    got[at as usize..][..pdu.data.len()].copy_from_slice(&pdu.data);
                    at += pdu.data.len() as u32;
                }
                assert_eq!(at, from + len);
            }
            assert!(got == data);
            queue.feed(&format.good(command.cid())).unwrap();
            assert!(matches!(queue.driver.done(), (1, Ok(Output::Nothing))));
        });
    }
}

#[test]
fn a_wrong_data_digest_fails_one_command_which_is_sent_again() {
    for len in [4096_usize, 100 << 10] {
        let mut queue = ScriptedQueue::ready(BOTH);
        queue.driver.step = 1 << 16;
        queue.driver.read(1, 0, len as u64);
        let (cid, data) = (queue.command().cid(), pattern(len));
        let mut bytes = BOTH.data(cid, 0, &data, FLAG_LAST | FLAG_SUCCESS);
        *bytes.last_mut().unwrap() ^= 1;
        queue.feed(&bytes).unwrap();
        queue.driver.assert_nothing_done();
        let mut now = queue.driver.stream().poll_timeout().unwrap();
        while queue.driver.stream().outbox().is_empty() {
            queue.driver.stream().on_timeout(now).unwrap();
            now = now.max(queue.driver.stream().poll_timeout().unwrap_or(now));
        }
        let cid = queue.command().cid();
        queue.feed(&BOTH.data(cid, 0, &data, FLAG_LAST | FLAG_SUCCESS)).unwrap();
        assert!(queue.driver.done_data() == data);
    }
}
