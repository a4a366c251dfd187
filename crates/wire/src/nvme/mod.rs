//! NVMe: the structures of the Base Specification 2.0 and 2.1 and of the NVM Command Set
//! Specification 1.0 and 1.1.
//!
//! ```text
//!   submission queue entry, 64 bytes ──▶ controller ──▶ completion queue entry, 16 bytes
//!   opcode, CID, NSID, DPTR, CDW10-15                   DW0-1, SQHD, SQID, CID, status
//! ```
//! All fields are little-endian. Field names are the specification's in snake case; offsets in doc
//! comments are in bytes from the beginning of the structure. [`crate::nvmeof`] has what is
//! specific to fabrics.

pub mod feature;
pub mod identify;
pub mod log;
pub mod nvm;
pub mod opcode;
pub mod property;
pub mod reservation;
pub mod status;

use crate::layout::layout;
use crate::open_enum::open_enum;
use status::StatusField;
use zerocopy::{LittleEndian as LE, U16, U32, U64};

layout! {
    /// A submission queue entry: a command (Base 2.0 §3.3.3.1, figure 87).
    pub struct Sqe(SQE_LEN) {
        /// [`opcode::AdminOpcode`] or [`opcode::NvmOpcode`].
        pub opcode: u8,
        /// FUSE in [`FUSE_MASK`], PSDT in [`PSDT_MASK`].
        pub flags: u8,
        /// Command identifier, unique among the queue's outstanding commands.
        pub cid: U16<LE>,
        /// Namespace identifier, from 1, or [`NSID_ALL`].
        pub nsid: U32<LE>,
        /// Command specific.
        pub cdw2: U32<LE>,
        /// Command specific.
        pub cdw3: U32<LE>,
        /// Metadata pointer.
        pub mptr: U64<LE>,
        /// Data pointer: over fabrics one SGL descriptor.
        pub dptr: SglDescriptor,
        /// Command specific.
        pub cdw10: U32<LE>,
        /// Command specific.
        pub cdw11: U32<LE>,
        /// Command specific.
        pub cdw12: U32<LE>,
        /// Command specific.
        pub cdw13: U32<LE>,
        /// Command specific.
        pub cdw14: U32<LE>,
        /// Command specific.
        pub cdw15: U32<LE>,
    }
}

impl Sqe {
    /// CDW10 and CDW11 as one number: the starting LBA of most NVM commands.
    #[inline]
    #[must_use]
    pub const fn slba(&self) -> u64 {
        (self.cdw11.get() as u64) << 32 | self.cdw10.get() as u64
    }

    /// Fused operation field of the command.
    #[inline]
    #[must_use]
    pub const fn fuse(&self) -> Fuse {
        Fuse(self.flags & FUSE_MASK)
    }
}

layout! {
    /// A completion queue entry (Base 2.0 §3.3.3.2, figure 89).
    pub struct Cqe(CQE_LEN) {
        /// Dwords 0 and 1: command specific.
        pub result: U64<LE>,
        /// Submission queue head pointer.
        pub sqhd: U16<LE>,
        /// Submission queue identifier; reserved over fabrics.
        pub sqid: U16<LE>,
        /// Command identifier.
        pub cid: U16<LE>,
        /// Status with its phase bit; over fabrics that bit is 0.
        pub status: StatusField,
    }
}

layout! {
    /// A Scatter Gather List descriptor (Base 2.0 §4.1.2).
    #[derive(Default)]
    pub struct SglDescriptor(16) {
        /// An address, or with [`SglSubtype::OFFSET`] an offset into the capsule's data.
        pub address: U64<LE>,
        /// Length in bytes. In a keyed descriptor: 24 bits of length, then the first byte of the
        /// key.
        pub length: U32<LE>,
        /// The remaining three bytes of a keyed descriptor's key; else reserved.
        pub reserved: [u8; 3],
        /// [`SglType`] in the high four bits, [`SglSubtype`] in the low.
        pub identifier: u8,
    }
}

impl SglDescriptor {
    /// A descriptor of this type.
    #[must_use]
    pub const fn new(kind: SglType, subtype: SglSubtype, address: u64, length: u32) -> SglDescriptor {
        SglDescriptor {
            address: U64::new(address),
            length: U32::new(length),
            reserved: [0; 3],
            identifier: kind.0 << 4 | subtype.0 & 0xf,
        }
    }

    /// A descriptor of in-capsule data at `offset`.
    #[must_use]
    pub const fn in_capsule(offset: u64, length: u32) -> SglDescriptor {
        SglDescriptor::new(SglType::DATA_BLOCK, SglSubtype::OFFSET, offset, length)
    }

    /// A descriptor of data that the transport transfers.
    #[must_use]
    pub const fn transport(length: u32) -> SglDescriptor {
        SglDescriptor::new(SglType::TRANSPORT_DATA_BLOCK, SglSubtype::TRANSPORT, 0, length)
    }

    /// A descriptor of memory that the other side accesses by RDMA with a key. `invalidates` asks
    /// it to invalidate the key. The length has 24 bits.
    #[must_use]
    pub const fn keyed(address: u64, length: u32, key: u32, invalidates: bool) -> SglDescriptor {
        let subtype = if invalidates { SglSubtype::INVALIDATE_KEY } else { SglSubtype::ADDRESS };
        let [first, second, third, fourth] = key.to_le_bytes();
        let length = length & KEYED_LENGTH_MAX | (first as u32) << 24;
        let descriptor = SglDescriptor::new(SglType::KEYED_DATA_BLOCK, subtype, address, length);
        SglDescriptor { reserved: [second, third, fourth], ..descriptor }
    }

    /// Length and key of a keyed descriptor.
    #[inline]
    #[must_use]
    pub const fn length_and_key(&self) -> (u32, u32) {
        let length = self.length.get();
        let [second, third, fourth] = self.reserved;
        let key = u32::from_le_bytes([(length >> 24) as u8, second, third, fourth]);
        (length & KEYED_LENGTH_MAX, key)
    }

    /// Length of the host's buffer for data that the transport transfers, in bytes; `None` for
    /// other descriptors.
    #[inline]
    #[must_use]
    pub const fn length_at_host(&self) -> Option<u32> {
        if self.is_transport() {
            Some(self.length.get())
        } else if self.kind().0 == SglType::KEYED_DATA_BLOCK.0 {
            Some(self.length_and_key().0)
        } else {
            None
        }
    }

    /// Whether the transport transfers the data.
    #[inline]
    #[must_use]
    pub const fn is_transport(&self) -> bool {
        self.kind().0 == SglType::TRANSPORT_DATA_BLOCK.0 && self.subtype().0 == SglSubtype::TRANSPORT.0
    }

    /// Type of the descriptor.
    #[inline]
    #[must_use]
    pub const fn kind(&self) -> SglType {
        SglType(self.identifier >> 4)
    }

    /// Subtype of the descriptor.
    #[inline]
    #[must_use]
    pub const fn subtype(&self) -> SglSubtype {
        SglSubtype(self.identifier & 0xf)
    }
}

open_enum! {
    /// SGL descriptor types (Base 2.0 figure 115).
    pub enum SglType(u8) {
        /// A data block.
        DATA_BLOCK = 0x0,
        /// A bit bucket: read data is discarded.
        BIT_BUCKET = 0x1,
        /// A segment of further descriptors.
        SEGMENT = 0x2,
        /// The last segment of descriptors.
        LAST_SEGMENT = 0x3,
        /// A keyed data block (RDMA).
        KEYED_DATA_BLOCK = 0x4,
        /// A data block that the transport transfers (TCP).
        TRANSPORT_DATA_BLOCK = 0x5,
        /// Vendor specific.
        VENDOR_SPECIFIC = 0xf,
    }

    /// SGL descriptor subtypes (Base 2.0 figure 116, and the transports').
    pub enum SglSubtype(u8) {
        /// The address is a memory address.
        ADDRESS = 0x0,
        /// The address is an offset into the capsule.
        OFFSET = 0x1,
        /// Transport specific (TCP Transport 1.0 §3.3.2); in a keyed descriptor: invalidate the key
        /// (RDMA).
        TRANSPORT = 0xa,
        /// In a keyed descriptor: invalidate the key (RDMA Transport 1.0).
        INVALIDATE_KEY = 0xf,
    }

    /// FUSE (Base 2.0 figure 86).
    pub enum Fuse(u8) {
        /// Not fused.
        NORMAL = 0,
        /// The first of two.
        FIRST = 1,
        /// The second of two.
        SECOND = 2,
    }
}

/// Longest data of a keyed descriptor, in bytes.
pub const KEYED_LENGTH_MAX: u32 = 0xff_ffff;
/// Length of a submission queue entry, in bytes.
pub const SQE_LEN: usize = 64;
/// Length of a completion queue entry, in bytes.
pub const CQE_LEN: usize = 16;
/// FUSE, in a command's flags.
pub const FUSE_MASK: u8 = 0x03;
/// PSDT, in a command's flags.
pub const PSDT_MASK: u8 = 0xc0;
/// PSDT: DPTR is an SGL, and MPTR the address of a buffer. The only value over fabrics.
pub const PSDT_SGL: u8 = 0x40;
/// PSDT: DPTR is an SGL, and MPTR points to an SGL.
pub const PSDT_SGL_METADATA: u8 = 0x80;
/// All namespaces, or no specific one.
pub const NSID_ALL: u32 = 0xffff_ffff;
/// Length of an NQN field with its terminating NUL, in bytes (Base 2.0 §4.5).
pub const NQN_FIELD_LEN: usize = 256;
/// Longest NVMe Qualified Name, in bytes.
pub const NQN_MAX_LEN: usize = 223;
/// The Command Set Identifier of the NVM Command Set.
pub const CSI_NVM: u8 = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use opcode::NvmOpcode;
    use zerocopy::{FromBytes, IntoBytes};

    /// A flush and a write of 4 KiB with its data in the capsule, as the Linux host 6.12 sent them.
    #[test]
    fn commands_read_as_the_kernel_sent_them() {
        let mut bytes = [0; SQE_LEN];
        bytes[..8].copy_from_slice(&[0x00, 0x40, 0x56, 0x00, 0x01, 0x00, 0x00, 0x00]);
        bytes[39] = 0x5a;
        let flush = Sqe::read_from_bytes(&bytes).unwrap();
        assert_eq!(NvmOpcode(flush.opcode), NvmOpcode::FLUSH);
        assert_eq!((flush.flags & PSDT_MASK, flush.cid.get(), flush.nsid.get()), (PSDT_SGL, 0x56, 1));
        assert_eq!(flush.dptr, SglDescriptor::transport(0));

        bytes[..8].copy_from_slice(&[0x01, 0x40, 0x55, 0x00, 0x01, 0x00, 0x00, 0x00]);
        bytes[32..40].copy_from_slice(&[0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01]);
        let write = Sqe::read_from_bytes(&bytes).unwrap();
        assert_eq!(NvmOpcode(write.opcode), NvmOpcode::WRITE);
        assert_eq!(write.dptr, SglDescriptor::in_capsule(0, 4096));
        assert_eq!((write.slba(), write.fuse()), (0, Fuse::NORMAL));
    }

    #[test]
    fn a_keyed_descriptor_has_its_fields_where_the_specification_has_them() {
        let descriptor = SglDescriptor::keyed(0x0807_0605_0403_0201, 0x000c_0b0a, 0x100f_0e0d, true);
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x4f];
        assert_eq!(descriptor.as_bytes(), bytes);
        assert_eq!(descriptor.length_and_key(), (0x000c_0b0a, 0x100f_0e0d));
        assert_eq!(SglDescriptor::keyed(0, 0, 0, false).identifier, 0x40);
        assert_eq!(descriptor.length_at_host(), Some(0x000c_0b0a));
        assert_eq!(SglDescriptor::transport(7).length_at_host(), Some(7));
        assert_eq!(SglDescriptor::in_capsule(0, 7).length_at_host(), None);
    }

    /// CAP of the Linux target 6.12, from its answer to the first Property Get.
    #[test]
    fn a_completion_reads_as_the_kernel_sent_it() {
        let bytes =
            [0xff, 0x03, 0x00, 0x0f, 0x20, 0x08, 0, 0, 0x02, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00];
        let cqe = Cqe::read_from_bytes(&bytes).unwrap();
        assert_eq!((cqe.result.get(), cqe.sqhd.get(), cqe.cid.get()), (0x0820_0f00_03ff, 2, 1));
        assert!(cqe.status.is_success());
    }
}
