//! iSER, iSCSI over RDMA, as in RFC 7145 and in Linux.
//!
//! ```text
//!   iSER header │ Basic Header Segment │ Additional Header Segments │ Data Segment      │ padding
//!   28 bytes    │ 48 bytes             │ TotalAHSLength × 4 bytes   │ DataSegmentLength │ to 4 bytes
//! ```
//! This is one message of a queue pair: an iSER header and an iSCSI control-type PDU without
//! digests. Solicited data has no messages: the target reads and writes the memory that a command's
//! header names, by RDMA.
//!
//! The first byte of every header has the opcode ([`IserOpcode`]) in its high half and flags in its
//! low half. Field names are the RFC's in snake case. [`CmHeader`] is the header of both sides'
//! private data.

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, U32, U64};

layout! {
    /// The header of an iSCSI control-type PDU. Tag and offset are 0 where the PDU names no memory.
    #[derive(Default)]
    pub struct ControlHeader(HEADER_LEN) {
        /// [`IserOpcode::CONTROL`], [`FLAG_WRITE_STAG`] and [`FLAG_READ_STAG`].
        pub opcode_flags: u8,
        pub reserved: [u8; 3] = 0,
        /// Tag of the initiator's data-out memory, for RDMA Read.
        pub write_stag: U32<BE>,
        /// Address of the first byte of data-out.
        pub write_base_offset: U64<BE>,
        /// Tag of the initiator's data-in memory, for RDMA Write.
        pub read_stag: U32<BE>,
        /// Address of the first byte of data-in.
        pub read_base_offset: U64<BE>,
    }
}

impl ControlHeader {
    /// Creates a header that names no memory.
    #[must_use]
    pub fn new() -> ControlHeader {
        ControlHeader { opcode_flags: IserOpcode::CONTROL.0 << OPCODE_SHIFT, ..ControlHeader::default() }
    }

    /// The opcode.
    #[inline]
    #[must_use]
    pub const fn opcode(&self) -> IserOpcode {
        IserOpcode(self.opcode_flags >> OPCODE_SHIFT)
    }

    /// Tag and address of the memory that the target may read (data-out).
    #[inline]
    #[must_use]
    pub fn write(&self) -> Option<(u32, u64)> {
        let is_there = self.opcode_flags & FLAG_WRITE_STAG != 0;
        is_there.then(|| (self.write_stag.get(), self.write_base_offset.get()))
    }

    /// Tag and address of the memory that the target may write (data-in).
    #[inline]
    #[must_use]
    pub fn read(&self) -> Option<(u32, u64)> {
        let is_there = self.opcode_flags & FLAG_READ_STAG != 0;
        is_there.then(|| (self.read_stag.get(), self.read_base_offset.get()))
    }

    /// Adds memory that the target may read.
    #[inline]
    #[must_use]
    pub fn with_write(mut self, stag: u32, offset: u64) -> ControlHeader {
        self.opcode_flags |= FLAG_WRITE_STAG;
        (self.write_stag, self.write_base_offset) = (stag.into(), offset.into());
        self
    }

    /// Adds memory that the target may write.
    #[inline]
    #[must_use]
    pub fn with_read(mut self, stag: u32, offset: u64) -> ControlHeader {
        self.opcode_flags |= FLAG_READ_STAG;
        (self.read_stag, self.read_base_offset) = (stag.into(), offset.into());
        self
    }
}

layout! {
    /// The header of the private data that both sides exchange when they connect.
    #[derive(Default)]
    pub struct CmHeader(4) {
        /// [`NO_ZERO_BASED_ADDRESSES`] and [`NO_REMOTE_INVALIDATION`].
        pub flags: u8,
        pub reserved: [u8; 3] = 0,
    }
}

impl CmHeader {
    /// Reads the header of private data; `None` if that is shorter than the header.
    #[must_use]
    pub fn of(private_data: &[u8]) -> Option<CmHeader> {
        CmHeader::read_from_prefix(private_data).ok().map(|(header, _)| header)
    }

    /// Whether the sender supports Send with Invalidate: a target sends it, an initiator accepts
    /// it.
    #[must_use]
    pub const fn invalidates(&self) -> bool {
        self.flags & NO_REMOTE_INVALIDATION == 0
    }
}

open_enum! {
    /// Opcodes of iSER headers.
    pub enum IserOpcode(u8) {
        /// [`ControlHeader`].
        CONTROL = 1,
    }
}

/// Length of an iSER header in bytes.
pub const HEADER_LEN: usize = 28;

/// WSV: the write tag and offset are valid.
pub const FLAG_WRITE_STAG: u8 = 0x08;
/// RSV: the read tag and offset are valid.
pub const FLAG_READ_STAG: u8 = 0x04;

/// Addresses in headers are virtual addresses, not offsets from the start of the memory.
pub const NO_ZERO_BASED_ADDRESSES: u8 = 0x80;
/// Send with Invalidate is not used.
pub const NO_REMOTE_INVALIDATION: u8 = 0x40;

const OPCODE_SHIFT: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::scsi::{ScsiCommand, ScsiResponse};
    use crate::iscsi::session::{IscsiLoginRequest, IscsiLoginResponse};
    use crate::iscsi::{BHS_LEN, IscsiOpcode};
    use zerocopy::IntoBytes;

    /// Messages between ib_iser and ib_isert of Linux 6.12 over siw: iSER header and BHS of each.
    const LOGIN: &str = "10000000000000000000000000000000000000000000000000000000\
        43870000000001ba00023d00000100000000000000000000000000000000000000000000000000000000000000000000";
    const LOGIN_RESPONSE: &str = "10000000000000000000000000000000000000000000000000000000\
        238700000000015000023d00000100010000000000000000238d5d350000000000000000000000000000000000000000";
    const INQUIRY: &str = "140000000000000000000000000000003ab21901ffff88803f4b4800\
        01c10000000000000000000000000000010000000000002400000000238d5d3612000000240000000000000000000000";
    const RESPONSE: &str = "10000000000000000000000000000000000000000000000000000000\
        218000000000000000000000000000000100000000000000238d5d360000000100000040000000000000000000000000";
    const WRITE_OF_64_KIB: &str = "18000000f8a72b18ffff888003454000000000000000000000000000\
        01a1000000002000000000000000000020000000000100000000001f238d5d552a000000010000008000000000000000";

    fn bytes(hex: &str) -> [u8; HEADER_LEN + BHS_LEN] {
        assert_eq!(hex.len(), 2 * (HEADER_LEN + BHS_LEN));
        let digit = |at: usize| (hex.as_bytes()[at] as char).to_digit(16).unwrap() as u8;
        core::array::from_fn(|at| digit(2 * at) << 4 | digit(2 * at + 1))
    }

    /// Returns the iSER header and the PDU after it.
    fn parts<T: FromBytes>(message: &[u8]) -> (ControlHeader, T) {
        let (header, pdu) = ControlHeader::read_from_prefix(message).unwrap();
        (header, T::read_from_bytes(pdu).unwrap())
    }

    #[test]
    fn a_linux_login_names_no_memory() {
        let message = bytes(LOGIN);
        let (header, request) = parts::<IscsiLoginRequest>(&message);
        assert_eq!((header, request.data_segment_length.get()), (ControlHeader::new(), 442));
        assert_eq!((header.read(), header.write()), (None, None));
        let message = bytes(LOGIN_RESPONSE);
        let (header, response) = parts::<IscsiLoginResponse>(&message);
        assert_eq!((header, response.tsih.get()), (ControlHeader::new(), 1));
        assert_eq!([header.as_bytes(), response.as_bytes()].concat_to::<76>(), message);
    }

    #[test]
    fn a_linux_read_names_its_data_in_memory() {
        let message = bytes(INQUIRY);
        let (header, command) = parts::<ScsiCommand>(&message);
        assert_eq!(header.opcode(), IserOpcode::CONTROL);
        assert_eq!((header.read(), header.write()), (Some((0x3ab2_1901, 0xffff_8880_3f4b_4800)), None));
        let built = ControlHeader::new().with_read(0x3ab2_1901, 0xffff_8880_3f4b_4800);
        assert_eq!([built.as_bytes(), command.as_bytes()].concat_to::<76>(), message);
        let (header, response) = parts::<ScsiResponse>(&bytes(RESPONSE));
        assert_eq!((header, response.opcode), (ControlHeader::new(), IscsiOpcode::SCSI_RESPONSE.0));
        assert_eq!(response.exp_data_sn.get(), 0, "there are no Data-In PDUs");
    }

    #[test]
    fn a_long_linux_write_has_immediate_data_and_names_the_rest() {
        let message = bytes(WRITE_OF_64_KIB);
        let (header, command) = parts::<ScsiCommand>(&message);
        assert_eq!((header.read(), header.write()), (None, Some((0xf8a7_2b18, 0xffff_8880_0345_4000))));
        assert_eq!(command.data_segment_length.get(), 8192);
        assert_eq!(command.expected_data_transfer_length.get(), 65_536);
        let built = ControlHeader::new().with_write(0xf8a7_2b18, 0xffff_8880_0345_4000);
        assert_eq!([built.as_bytes(), command.as_bytes()].concat_to::<76>(), message);
    }

    #[test]
    fn linux_supports_send_with_invalidate_and_uses_virtual_addresses() {
        // From the MPA frames of both sides, after IRD and ORD.
        let header = CmHeader::of(&[0x80, 0, 0, 0]).unwrap();
        assert_eq!(header, CmHeader { flags: NO_ZERO_BASED_ADDRESSES, reserved: [0; 3] });
        assert!(header.invalidates());
        assert!(!CmHeader::of(&[0xc0, 0, 0, 0, 7]).unwrap().invalidates());
        assert_eq!((CmHeader::of(&[0x80, 0, 0]), CmHeader::of(&[])), (None, None));
    }

    /// Concatenates into arrays, as the crate has no allocator.
    trait ConcatTo {
        fn concat_to<const N: usize>(&self) -> [u8; N];
    }

    impl ConcatTo for [&[u8]; 2] {
        fn concat_to<const N: usize>(&self) -> [u8; N] {
            let [first, second] = self;
            assert_eq!(first.len() + second.len(), N);
            core::array::from_fn(|at| {
                first.get(at).or(second.get(at.wrapping_sub(first.len()))).copied().unwrap()
            })
        }
    }
}
