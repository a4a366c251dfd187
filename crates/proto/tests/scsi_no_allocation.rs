//! Tests that READ, WRITE, SYNCHRONIZE CACHE and UNMAP of one range allocate nothing in the device
//! server.
#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::exports::VolumeId;
use blockmux_proto::scsi::*;
use blockmux_volume::{Completion, MemVolume, Memory, Op, Output, SgList, Tag};
use std::sync::Arc;

/// Executes a command; the function acts as the volume.
fn run(server: &mut DeviceServer, cdb: &[u8], data_out: &SgList, data_in: &SgList) -> ScsiStatus {
    let command = Command {
        lun: Lun::new(0),
        cdb: Cdb::new(cdb).unwrap(),
        attribute: TaskAttribute::Simple,
        data_out_len: data_out.len() as u32,
        data_in_len: data_in.len() as u32,
    };
    let (mut task, mut step) = server.begin(&command);
    loop {
        step = match step {
            TaskStep::Done(response) => return response.status,
            TaskStep::Wait | TaskStep::Pause(_) => server.resume(&mut task),
            TaskStep::DataOut { len } => server.on_data_out(&mut task, data_out.slice(0, len)),
            TaskStep::Io { io, .. } => {
                let output = match io.op {
                    Op::Read => Output::Data(data_in.clone()),
                    _ => Output::Nothing,
                };
                server.on_io(&mut task, Completion { tag: Tag(0), result: Ok(output) })
            }
        };
    }
}

#[test]
fn commands_on_one_range_allocate_nothing() {
    let unit = LogicalUnit::new(UnitIdentity::of("a"), Arc::new(MemVolume::new(1 << 20)));
    let port = TargetPort { relative_id: 1, group: 1, name: "t".into() };
    let target = ScsiTarget::new("t", vec![port.clone()]).with_unit(0, VolumeId(0), unit);
    let mut server = DeviceServer::new(Arc::new(target), ItNexus::iscsi("i", [0; 6], port));
    let (block, list) = (SgList::one(Memory::from_heap(512).seg(0, 512)), Memory::from_heap(24).seg(0, 24));
    list.copy_from(&[0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0]);
    let (list, none) = (SgList::one(list), SgList::default());
    let commands: [(&[u8], &SgList, &SgList); 6] = [
        (&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &none, &block),
        (&[0x2a, 8, 0, 0, 0, 0, 0, 0, 1, 0], &block, &none),
        (&[0x88, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0], &none, &block),
        (&[0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0], &block, &none),
        (&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &none, &none),
        (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list, &none),
    ];
    assert_eq!(run(&mut server, &[0; 6], &none, &none), ScsiStatus::CHECK_CONDITION);
    // The first I/O on a unit begins to count the session's I/O there.
    assert_eq!(run(&mut server, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &none, &block), ScsiStatus::GOOD);
    for (cdb, data_out, data_in) in commands {
        let before = counting::of_this_thread();
        assert_eq!(run(&mut server, cdb, data_out, data_in), ScsiStatus::GOOD, "{cdb:x?}");
        assert_eq!(counting::of_this_thread() - before, 0, "{cdb:x?}");
    }
    // The counter works: INQUIRY allocates its data.
    let before = counting::of_this_thread();
    run(&mut server, &[0x12, 0, 0, 0, 96, 0], &none, &none);
    assert_ne!(counting::of_this_thread() - before, 0);
}
