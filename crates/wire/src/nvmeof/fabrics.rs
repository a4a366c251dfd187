//! Fabrics commands and the discovery log (Base 2.0 §6 and §5.16.1.23).

use crate::layout::layout;
use crate::nvme::{NQN_FIELD_LEN, SQE_LEN, SglDescriptor, Sqe};
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16, U32, U64};

open_enum! {
    /// FCTYPE: the type of a Fabrics command (Base 2.0 figure 375).
    pub enum FabricsType(u8) {
        /// [`PropertyCommand`].
        PROPERTY_SET = 0x00,
        /// [`Connect`].
        CONNECT = 0x01,
        /// [`PropertyCommand`].
        PROPERTY_GET = 0x04,
        /// Authentication Send.
        AUTHENTICATION_SEND = 0x05,
        /// Authentication Receive.
        AUTHENTICATION_RECEIVE = 0x06,
        /// Disconnect.
        DISCONNECT = 0x08,
    }
}

/// FCTYPE of a command, which has the position of NSID in other commands.
#[inline]
#[must_use]
pub const fn fabrics_type(sqe: &Sqe) -> FabricsType {
    FabricsType(sqe.nsid.get().to_le_bytes()[0])
}

layout! {
    /// Connect (Base 2.0 figure 378); [`ConnectData`] is its data.
    pub struct Connect(SQE_LEN) {
        /// [`crate::nvme::opcode::AdminOpcode::FABRICS`].
        pub opcode: u8,
        /// PSDT.
        pub flags: u8,
        /// Command identifier.
        pub cid: U16<LE>,
        /// [`FabricsType::CONNECT`].
        pub fctype: u8,
        pub reserved_5: [u8; 19] = 0,
        /// SGL descriptor of the data.
        pub sgl1: SglDescriptor,
        /// Record format: 0.
        pub recfmt: U16<LE>,
        /// Queue identifier; 0 for the admin queue.
        pub qid: U16<LE>,
        /// Number of entries of the queue, less one.
        pub sqsize: U16<LE>,
        /// [`CATTR_DISABLE_SQ_FLOW_CONTROL`].
        pub cattr: u8,
        pub reserved_47: u8 = 0,
        /// Keep Alive Timeout in milliseconds; 0 for none.
        pub kato: U32<LE>,
        pub reserved_52: [u8; 12] = 0,
    }

    /// The data of Connect (Base 2.0 figure 379).
    pub struct ConnectData(CONNECT_DATA_LEN) {
        /// Host identifier.
        pub hostid: [u8; 16],
        /// [`CNTLID_DYNAMIC`], [`CNTLID_STATIC`], or the controller identifier for an I/O queue.
        pub cntlid: U16<LE>,
        pub reserved_18: [u8; 238] = 0,
        /// NQN of the subsystem, NUL-terminated.
        pub subnqn: [u8; NQN_FIELD_LEN],
        /// NQN of the host, NUL-terminated.
        pub hostnqn: [u8; NQN_FIELD_LEN],
        pub reserved_768: [u8; 256] = 0,
    }

    /// Property Get and Property Set (Base 2.0 figures 384 and 387).
    pub struct PropertyCommand(SQE_LEN) {
        /// [`crate::nvme::opcode::AdminOpcode::FABRICS`].
        pub opcode: u8,
        /// PSDT.
        pub flags: u8,
        /// Command identifier.
        pub cid: U16<LE>,
        /// [`FabricsType`].
        pub fctype: u8,
        pub reserved_5: [u8; 35] = 0,
        /// Size of the property in the low three bits: 0 for four bytes, 1 for eight.
        pub attrib: u8,
        pub reserved_41: [u8; 3] = 0,
        /// Offset of the property: [`crate::nvme::property`].
        pub ofst: U32<LE>,
        /// The value to set: of four bytes, the low ones. Reserved in Property Get.
        pub value: U64<LE>,
        pub reserved_56: [u8; 8] = 0,
    }

    /// The header of the discovery log page (Base 2.0 figure 263).
    pub struct DiscoveryHeader(DISCOVERY_ENTRY_LEN) {
        /// Generation counter of the log.
        pub genctr: U64<LE>,
        /// Number of entries that follow.
        pub numrec: U64<LE>,
        /// Record format: 0.
        pub recfmt: U16<LE>,
        pub reserved: [u8; 1006] = 0,
    }

    /// One entry of the discovery log page (Base 2.0 figure 264).
    pub struct DiscoveryEntry(DISCOVERY_ENTRY_LEN) {
        /// [`TransportType`].
        pub trtype: u8,
        /// [`AddressFamily`].
        pub adrfam: u8,
        /// [`SubsystemType`].
        pub subtype: u8,
        /// Transport requirements: secure channel in the low two bits, bit 2: SQ flow control can
        /// be disabled.
        pub treq: u8,
        /// Port identifier.
        pub portid: U16<LE>,
        /// Controller identifier, as in [`ConnectData`].
        pub cntlid: U16<LE>,
        /// Entries of the admin queue.
        pub asqsz: U16<LE>,
        /// Entry flags: `EFLAGS_*`.
        pub eflags: U16<LE>,
        pub reserved_12: [u8; 20] = 0,
        /// Transport service identifier: a TCP port in decimal, ASCII, padded with spaces.
        pub trsvcid: [u8; 32],
        pub reserved_64: [u8; 192] = 0,
        /// NQN of the subsystem, NUL-terminated.
        pub subnqn: [u8; NQN_FIELD_LEN],
        /// Transport address: ASCII, padded with spaces.
        pub traddr: [u8; 256],
        /// Transport specific address subtype: for TCP, [`super::tcp::SecurityType`] in the first
        /// byte; for RDMA, beginning with [`super::rdma::QpType`].
        pub tsas: [u8; 256],
    }
}

open_enum! {
    /// TRTYPE.
    pub enum TransportType(u8) {
        /// RDMA.
        RDMA = 1,
        /// Fibre Channel.
        FIBRE_CHANNEL = 2,
        /// TCP.
        TCP = 3,
        /// Intra-host.
        INTRA_HOST = 254,
    }

    /// ADRFAM.
    pub enum AddressFamily(u8) {
        /// AF_INET.
        IPV4 = 1,
        /// AF_INET6.
        IPV6 = 2,
        /// AF_IB.
        INFINIBAND = 3,
        /// Fibre Channel.
        FIBRE_CHANNEL = 4,
    }

    /// SUBTYPE.
    pub enum SubsystemType(u8) {
        /// A referral to another discovery subsystem.
        REFERRAL = 1,
        /// A subsystem with namespaces.
        NVM = 2,
        /// This discovery subsystem.
        CURRENT_DISCOVERY = 3,
    }
}

/// The well-known NQN of every discovery subsystem (Base 2.0 §3.1.2.3).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// CNTLID in Connect: any controller, dynamic model.
pub const CNTLID_DYNAMIC: u16 = 0xffff;
/// CNTLID in Connect: any controller, static model.
pub const CNTLID_STATIC: u16 = 0xfffe;
/// Greatest controller identifier.
pub const CNTLID_MAX: u16 = 0xffef;
/// CATTR of Connect: disable SQ flow control; completions carry no SQHD.
pub const CATTR_DISABLE_SQ_FLOW_CONTROL: u8 = 1 << 2;
/// ATTRIB of properties: eight bytes.
pub const ATTRIB_8_BYTES: u8 = 1;
/// Length of [`ConnectData`], in bytes.
pub const CONNECT_DATA_LEN: usize = 1024;
/// Length of a discovery log entry and of the header, in bytes.
pub const DISCOVERY_ENTRY_LEN: usize = 1024;
/// EFLAGS: other entries return duplicate information.
pub const EFLAGS_DUPRETINFO: u16 = 1;
/// EFLAGS: explicit persistent connections for discovery are supported.
pub const EFLAGS_EPCSD: u16 = 1 << 1;
/// TREQ: a secure channel is required.
pub const TREQ_REQUIRED: u8 = 1;
/// TREQ: a secure channel is not required.
pub const TREQ_NOT_REQUIRED: u8 = 2;
/// TREQ: SQ flow control can be disabled.
pub const TREQ_DISABLE_SQ_FLOW_CONTROL: u8 = 1 << 2;
/// ATR in the result of Connect: authentication is required.
pub const AUTHREQ_ATR: u32 = 1 << 17;
/// ASCR in the result of Connect: authentication with secure channel concatenation is required.
pub const AUTHREQ_ASCR: u32 = 1 << 18;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    /// Commands that the Linux host 6.12 sent: Connect of a discovery controller's admin queue,
    /// Property Get of CAP, and Property Set of CC.
    #[test]
    fn fabrics_commands_read_as_the_kernel_sent_them() {
        let mut bytes = [0; SQE_LEN];
        bytes[..5].copy_from_slice(&[0x7f, 0x40, 0x00, 0x00, 0x01]);
        bytes[32..46].copy_from_slice(&[0, 4, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x1f, 0]);
        let connect = Connect::read_from_bytes(&bytes).unwrap();
        assert_eq!(FabricsType(connect.fctype), FabricsType::CONNECT);
        assert_eq!(connect.sgl1, SglDescriptor::in_capsule(0, 1024));
        assert_eq!((connect.qid.get(), connect.sqsize.get(), connect.kato.get()), (0, 31, 0));
        assert_eq!(fabrics_type(&Sqe::read_from_bytes(&bytes).unwrap()), FabricsType::CONNECT);

        let mut bytes = [0; SQE_LEN];
        bytes[..5].copy_from_slice(&[0x7f, 0x40, 0x01, 0x00, 0x04]);
        bytes[39] = 0x5a;
        bytes[40] = ATTRIB_8_BYTES;
        let get = PropertyCommand::read_from_bytes(&bytes).unwrap();
        assert_eq!(FabricsType(get.fctype), FabricsType::PROPERTY_GET);
        assert_eq!((get.attrib & 7, get.ofst.get()), (ATTRIB_8_BYTES, crate::nvme::property::CAP));

        let mut bytes = [0; SQE_LEN];
        bytes[..5].copy_from_slice(&[0x7f, 0x40, 0x01, 0x00, 0x00]);
        bytes[40..52].copy_from_slice(&[0, 0, 0, 0, 0x14, 0, 0, 0, 0x60, 0, 0x46, 0]);
        let set = PropertyCommand::read_from_bytes(&bytes).unwrap();
        assert_eq!(FabricsType(set.fctype), FabricsType::PROPERTY_SET);
        assert_eq!((set.ofst.get(), set.value.get()), (crate::nvme::property::CC, 0x46_0060));
    }
}
