//! Data transfer: capsules, R2T, digests, alignment.

use super::*;
use blockmux_volume::SHORT_PAYLOAD;
use blockmux_wire::nvme::identify::IdentifyController;

#[test]
fn data_is_transferred_in_capsules_and_by_r2t_with_every_digest() {
    for digests in 0..4 {
        let (mut io, _admin) = TcpTestHost::io(&node(), digests);
        // In the capsule; requested and borrowed; requested and placed.
        for (slba, len) in [(0, 512), (8, 8192), (100, 16384), (1000, 128 << 10), (2000, 1 << 20)] {
            let data = pattern(len);
            let mut write = nvm(NvmOpcode::WRITE, 1, slba, len as u32 / 512);
            if len <= 8192 {
                assert!(io.run(write, &data).1.status.is_success());
            } else {
                io.send(&mut write, &[]);
                let r2t: NvmeTcpR2t = io.received()[0].as_a();
                assert_eq!((r2t.cccid, r2t.r2to.get(), r2t.r2tl.get() as usize), (write.cid, 0, len));
                let bytes = io.h2c_data(&r2t, 0, &data, true);
                io.pump.client_sends(&bytes).unwrap();
                assert!(io.end_of(write).1.status.is_success());
            }
            let (read, cqe) = io.run(nvm(NvmOpcode::READ, 1, slba, len as u32 / 512), &[]);
            assert!(cqe.status.is_success());
            assert!(read == data, "{len} bytes with digests {digests}");
        }
        assert!(io.pump.placed > 0);
    }
}

#[test]
fn data_may_come_in_any_number_of_pdus() {
    for len in [SHORT_PAYLOAD.min(32 << 10), 512 << 10] {
        let (mut io, _admin) = TcpTestHost::io(&node(), DGST_DATA);
        let data = pattern(len);
        let mut write = nvm(NvmOpcode::WRITE, 1, 0, len as u32 / 512);
        io.send(&mut write, &[]);
        let r2t: NvmeTcpR2t = io.received()[0].as_a();
        for (n, piece) in data.chunks(len / 4).enumerate() {
            let bytes = io.h2c_data(&r2t, n * len / 4, piece, n == 3);
            io.pump.client_sends(&bytes).unwrap();
        }
        assert!(io.end_of(write).1.status.is_success());
        assert!(io.run(nvm(NvmOpcode::READ, 1, 0, len as u32 / 512), &[]).0 == data);
    }
}

#[test]
fn without_flow_control_a_reads_success_is_implied() {
    let node = node();
    let (_admin, cntlid) = TcpTestHost::admin(&node, 0);
    let mut io = TcpTestHost::initialized(&node, 0);
    let connected = io.connect(1, cntlid, CATTR_DISABLE_SQ_FLOW_CONTROL);
    assert_eq!(connected.sqhd.get(), 0xffff);
    io.send(&mut nvm(NvmOpcode::READ, 1, 0, 8), &[]);
    let pdus = io.received();
    assert_eq!((pdus.len(), pdus[0].common.flags), (1, FLAG_LAST | FLAG_SUCCESS));
    // A failure is always completed explicitly.
    io.send(&mut nvm(NvmOpcode::READ, 1, SIZE / 512, 8), &[]);
    assert_eq!(refusal(&io.received()[0].cqe()), NvmeStatus::LBA_OUT_OF_RANGE);
}

#[test]
fn data_for_the_host_is_aligned_by_hpda() {
    let node = node();
    let mut host = TcpTestHost::new(&node);
    let request = IcReq { hpda: 31, ..ic_req(DGST_HEADER) };
    host.pump.exchange(request.as_bytes());
    host.digests = DGST_HEADER;
    assert!(host.connect(0, CNTLID_DYNAMIC, 0).status.is_success());
    host.enable();
    host.send(&mut admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]);
    let pdus = host.received();
    assert_eq!((pdus[0].common.pdo, pdus[0].data.len()), (128, 4096));
}

/// The bytes of a Linux 6.12 host that connects to a discovery controller.
#[test]
fn the_kernels_connection_begins_as_captured() {
    let mut host = TcpTestHost::new(&node());
    let mut bytes = [0; IC_LEN];
    bytes[..8].copy_from_slice(&[0x00, 0x00, 0x80, 0x00, 0x80, 0x00, 0x00, 0x00]);
    let mut expected = [0; IC_LEN];
    // MAXH2CDATA differs: the kernel's target has 4 MiB.
    expected[..16].copy_from_slice(&[1, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0]);
    assert_eq!(host.pump.exchange(&bytes), expected);

    let mut connect = [0; 72 + 1024];
    connect[..8].copy_from_slice(&[0x04, 0x00, 0x48, 0x48, 0x48, 0x04, 0x00, 0x00]);
    connect[8..13].copy_from_slice(&[0x7f, 0x40, 0x00, 0x00, 0x01]);
    connect[40..54].copy_from_slice(&[0, 4, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x1f, 0]);
    connect[72..90].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0xff, 0xff]);
    connect[328..364].copy_from_slice(DISCOVERY_NQN.as_bytes());
    connect[584..584 + HOST.len()].copy_from_slice(HOST.as_bytes());
    let answer = host.pump.exchange(&connect);
    assert_eq!(answer, [5, 0, 0x18, 0, 0x18, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);

    let mut get = [0; 72];
    get[..8].copy_from_slice(&[0x04, 0x00, 0x48, 0x00, 0x48, 0x00, 0x00, 0x00]);
    get[8..13].copy_from_slice(&[0x7f, 0x40, 0x01, 0x00, 0x04]);
    (get[47], get[48]) = (0x5a, 1);
    let answer = host.pump.exchange(&get);
    assert_eq!(answer[..8], [5, 0, 0x18, 0, 0x18, 0, 0, 0]);
    assert_eq!(answer[8..10], [0xff, 0x03]);
    assert_eq!(answer[16..], [2, 0, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn a_capsule_holds_as_much_data_as_configured() {
    for (wanted, len) in [(0, 0), (16 << 10, 16 << 10), (1 << 20, 32 << 10)] {
        let (shared, exports) = node();
        let shared = Arc::into_inner(shared).unwrap().with_in_capsule(wanted);
        let (mut io, mut queue) = TcpTestHost::io(&(Arc::new(shared), exports), 3);
        let page = queue.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]).0;
        let page = IdentifyController::read_from_bytes(&page).unwrap();
        assert_eq!(page.ioccsz.get() as usize * 16, 64 + len);
        if len > 0 {
            let data = pattern(len);
            let write = nvm(NvmOpcode::WRITE, 1, 0, (len / 512) as u32);
            assert!(io.run(write, &data).1.status.is_success());
            assert_eq!(io.run(nvm(NvmOpcode::READ, 1, 0, (len / 512) as u32), &[]).0, data);
        }
    }
}
