//! Captures of connections, and tshark, which dissects them.

use blockmux_proto::rdma::Endpoint;
use blockmux_volume::{Memory, SgList};
use std::fs;
use std::process::Command;

/// Frames in the format of libpcap, each with an IP header first.
pub(crate) struct Pcap(Vec<u8>);

impl Pcap {
    pub(crate) fn new() -> Pcap {
        // The link type is LINKTYPE_RAW.
        let header: [u32; 6] = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, 101];
        Pcap(header.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    pub(crate) fn record(&mut self, frame: &[u8]) {
        let len = frame.len() as u32;
        for word in [0, 0, len, len] {
            self.0.extend(word.to_le_bytes());
        }
        self.0.extend(frame);
    }

    /// What tshark prints about the frames.
    pub(crate) fn dissect(&self, arguments: &[&str]) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("capture.pcap");
        fs::write(&path, &self.0).unwrap();
        let output = Command::new("tshark").args(arguments).arg("-r").arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

pub(crate) fn is_installed() -> bool {
    Command::new("tshark").arg("--version").output().is_ok()
}

/// An endpoint with enough of everything.
pub(crate) fn endpoint() -> Endpoint {
    Endpoint {
        receives: 64,
        receive_len: 16 << 10,
        sends: 64,
        reads: 8,
        regions: 8,
        private_data: b"private data".to_vec(),
        without_invalidation: None,
    }
}

/// Memory with zeroes.
pub(crate) fn memory(len: usize) -> SgList {
    SgList::one(Memory::from_heap(len).seg(0, len))
}
