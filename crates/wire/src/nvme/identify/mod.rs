//! Identify (Base 2.0 §5.17; NVM Command Set 1.0 §4.1.5): every structure is [`IDENTIFY_LEN`]
//! bytes.

mod bits;

pub use bits::*;

use super::NQN_FIELD_LEN;
use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16, U32, U64, U128};

open_enum! {
    /// CNS in CDW10 of Identify (Base 2.0 figure 274).
    pub enum Cns(u8) {
        /// [`IdentifyNamespace`].
        NAMESPACE = 0x00,
        /// [`IdentifyController`].
        CONTROLLER = 0x01,
        /// 1,024 namespace identifiers above NSID.
        ACTIVE_NAMESPACE_LIST = 0x02,
        /// [`NamespaceDescriptor`]s.
        NAMESPACE_IDENTIFICATION_DESCRIPTORS = 0x03,
        /// Identify Namespace of the command set in CDW11; for the NVM Command Set, zeroes if there
        /// is no protection information (figure 100).
        IO_COMMAND_SET_NAMESPACE = 0x05,
        /// Identify Controller of the command set in CDW11: [`IdentifyControllerNvm`].
        IO_COMMAND_SET_CONTROLLER = 0x06,
        /// As 02h, of namespaces with the command set in CDW11.
        IO_COMMAND_SET_ACTIVE_NAMESPACE_LIST = 0x07,
        /// [`IdentifyNamespaceIndependent`].
        IO_COMMAND_SET_INDEPENDENT_NAMESPACE = 0x08,
        /// As 02h, of allocated namespaces.
        ALLOCATED_NAMESPACE_LIST = 0x10,
        /// As 00h, of an allocated namespace.
        ALLOCATED_NAMESPACE = 0x11,
        /// Controllers attached to NSID, from CNTID: a number of two bytes, and identifiers.
        NAMESPACE_ATTACHED_CONTROLLER_LIST = 0x12,
        /// Controllers of the subsystem, from CNTID.
        CONTROLLER_LIST = 0x13,
        /// Combinations of I/O command sets: 512 vectors of 64 bits.
        IO_COMMAND_SETS = 0x1c,
    }
}

layout! {
    /// Identify Controller (Base 2.0 figure 276).
    pub struct IdentifyController(IDENTIFY_LEN) {
        /// PCI vendor.
        pub vid: U16<LE>,
        /// PCI subsystem vendor.
        pub ssvid: U16<LE>,
        /// Serial number, ASCII, padded with spaces.
        pub sn: [u8; 20],
        /// Model number, ASCII, padded with spaces.
        pub mn: [u8; 40],
        /// Firmware revision, ASCII, padded with spaces.
        pub fr: [u8; 8],
        /// Recommended arbitration burst.
        pub rab: u8,
        /// Vendor's OUI.
        pub ieee: [u8; 3],
        /// Multi-path capabilities: `CMIC_*`.
        pub cmic: u8,
        /// Maximum data transfer size: log2, in units of CAP.MPSMIN (4 KiB); 0 is no limit.
        pub mdts: u8,
        /// Controller identifier.
        pub cntlid: U16<LE>,
        /// Version, as in the VS property.
        pub ver: U32<LE>,
        /// Resume latency, in microseconds.
        pub rtd3r: U32<LE>,
        /// Entry latency, in microseconds.
        pub rtd3e: U32<LE>,
        /// Asynchronous events supported: bits as in the feature's `AEC_*`.
        pub oaes: U32<LE>,
        /// Controller attributes: `CTRATT_*`.
        pub ctratt: U32<LE>,
        /// Read recovery levels.
        pub rrls: U16<LE>,
        pub reserved_102: [u8; 9] = 0,
        /// [`ControllerType`].
        pub cntrltype: u8,
        /// FRU globally unique identifier.
        pub fguid: [u8; 16],
        /// Command retry delay times 1 to 3, in units of 100 ms.
        pub crdt: [U16<LE>; 3],
        pub reserved_134: [u8; 122] = 0,
        /// Optional admin commands.
        pub oacs: U16<LE>,
        /// Concurrent Aborts, less one.
        pub acl: u8,
        /// Concurrent Asynchronous Event Requests, less one.
        pub aerl: u8,
        /// Firmware updates.
        pub frmw: u8,
        /// Log page attributes: `LPA_*`.
        pub lpa: u8,
        /// Entries of the error log, less one.
        pub elpe: u8,
        /// Power states, less one.
        pub npss: u8,
        /// Admin vendor specific command configuration.
        pub avscc: u8,
        /// Autonomous power state transitions.
        pub apsta: u8,
        /// Warning temperature, in kelvins.
        pub wctemp: U16<LE>,
        /// Critical temperature, in kelvins.
        pub cctemp: U16<LE>,
        /// Maximum time for firmware activation, in units of 100 ms.
        pub mtfa: U16<LE>,
        /// Host memory buffer.
        pub hmpre: U32<LE>,
        /// Host memory buffer.
        pub hmmin: U32<LE>,
        /// Total NVM capacity, in bytes.
        pub tnvmcap: U128<LE>,
        /// Unallocated NVM capacity, in bytes.
        pub unvmcap: U128<LE>,
        /// Replay protected memory.
        pub rpmbs: U32<LE>,
        /// Device self-test, in minutes.
        pub edstt: U16<LE>,
        /// Device self-test options.
        pub dsto: u8,
        /// Firmware update granularity.
        pub fwug: u8,
        /// Keep alive granularity, in units of 100 ms; 0 is no Keep Alive.
        pub kas: U16<LE>,
        /// Host controlled thermal management.
        pub hctma: U16<LE>,
        /// Minimum thermal management temperature, in kelvins.
        pub mntmt: U16<LE>,
        /// Maximum thermal management temperature, in kelvins.
        pub mxtmt: U16<LE>,
        /// Sanitize capabilities.
        pub sanicap: U32<LE>,
        /// Host memory buffer.
        pub hmminds: U32<LE>,
        /// Host memory buffer.
        pub hmmaxd: U16<LE>,
        /// NVM sets.
        pub nsetidmax: U16<LE>,
        /// Endurance groups.
        pub endgidmax: U16<LE>,
        /// ANA transition time, in seconds.
        pub anatt: u8,
        /// ANA capabilities: `ANACAP_*`.
        pub anacap: u8,
        /// The greatest ANA group identifier.
        pub anagrpmax: U32<LE>,
        /// Number of ANA groups.
        pub nanagrpid: U32<LE>,
        /// Persistent event log size, in units of 64 KiB.
        pub pels: U32<LE>,
        /// Domain.
        pub domain_identifier: U16<LE>,
        pub reserved_358: [u8; 10] = 0,
        /// Maximum endurance group capacity, in bytes.
        pub megcap: U128<LE>,
        pub reserved_384: [u8; 128] = 0,
        /// Submission queue entry sizes: log2 of the minimum in the low four bits, of the maximum
        /// in the high four.
        pub sqes: u8,
        /// Completion queue entry sizes.
        pub cqes: u8,
        /// Maximum outstanding commands of one queue.
        pub maxcmd: U16<LE>,
        /// The greatest namespace identifier.
        pub nn: U32<LE>,
        /// Optional NVM commands: `ONCS_*`.
        pub oncs: U16<LE>,
        /// Fused operations: bit 0 compare and write.
        pub fuses: U16<LE>,
        /// Format attributes.
        pub fna: u8,
        /// Volatile write cache: `VWC_*`.
        pub vwc: u8,
        /// Atomic write unit, normal, in logical blocks less one.
        pub awun: U16<LE>,
        /// Atomic write unit, power fail, in logical blocks less one.
        pub awupf: U16<LE>,
        /// Vendor specific command configuration.
        pub icsvscc: u8,
        /// Namespace write protection.
        pub nwpc: u8,
        /// Atomic compare and write unit, in logical blocks less one.
        pub acwu: U16<LE>,
        /// Copy descriptor formats: a bit each.
        pub cdfs: U16<LE>,
        /// SGL support: `SGLS_*`.
        pub sgls: U32<LE>,
        /// Maximum number of allowed namespaces; 0 for NN.
        pub mnan: U32<LE>,
        /// Domain namespace attachments.
        pub maxdna: U128<LE>,
        /// Controller namespace attachments.
        pub maxcna: U32<LE>,
        /// Optimal aggregated queue depth (Base 2.1).
        pub oaqd: U32<LE>,
        pub reserved_568: [u8; 200] = 0,
        /// NQN of the subsystem, NUL-terminated.
        pub subnqn: [u8; NQN_FIELD_LEN],
        pub reserved_1024: [u8; 768] = 0,
        /// Fabrics: maximum command capsule size, in units of 16 bytes.
        pub ioccsz: U32<LE>,
        /// Fabrics: maximum response capsule size, in units of 16 bytes.
        pub iorcsz: U32<LE>,
        /// Fabrics: offset of in-capsule data after the submission queue entry, in units of 16
        /// bytes.
        pub icdoff: U16<LE>,
        /// Fabrics: controller attributes. Bit 0: the static controller model.
        pub fcatt: u8,
        /// Fabrics: maximum number of SGL data block descriptors of one command.
        pub msdbd: u8,
        /// Fabrics: optional commands: [`OFCS_DISCONNECT`].
        pub ofcs: U16<LE>,
        /// Discovery controller type.
        pub dctype: u8,
        pub reserved_1807: [u8; 241] = 0,
        /// Power state descriptors.
        pub psd: [[u8; 32]; 32],
        /// Vendor specific.
        pub vs: [u8; 1024],
    }

    /// Identify Namespace of the NVM Command Set (NVM Command Set 1.0 figure 97).
    pub struct IdentifyNamespace(IDENTIFY_LEN) {
        /// Size, in logical blocks.
        pub nsze: U64<LE>,
        /// Capacity, in logical blocks.
        pub ncap: U64<LE>,
        /// Utilization, in logical blocks.
        pub nuse: U64<LE>,
        /// Features: `NSFEAT_*`.
        pub nsfeat: u8,
        /// LBA formats, less one.
        pub nlbaf: u8,
        /// Current LBA format, in bits 3:0 and 6:5.
        pub flbas: u8,
        /// Metadata capabilities.
        pub mc: u8,
        /// Data protection capabilities.
        pub dpc: u8,
        /// Data protection settings.
        pub dps: u8,
        /// Multi-path and sharing: `NMIC_*`.
        pub nmic: u8,
        /// Reservation capabilities: `RESCAP_*`.
        pub rescap: u8,
        /// Format progress.
        pub fpi: u8,
        /// Deallocation features: `DLFEAT_*`.
        pub dlfeat: u8,
        /// Atomic write unit, normal, in logical blocks less one.
        pub nawun: U16<LE>,
        /// Atomic write unit, power fail, in logical blocks less one.
        pub nawupf: U16<LE>,
        /// Atomic compare and write unit, in logical blocks less one.
        pub nacwu: U16<LE>,
        /// Atomic boundary size.
        pub nabsn: U16<LE>,
        /// Atomic boundary offset.
        pub nabo: U16<LE>,
        /// Atomic boundary size, power fail.
        pub nabspf: U16<LE>,
        /// Optimal I/O boundary, in logical blocks.
        pub noiob: U16<LE>,
        /// NVM capacity, in bytes.
        pub nvmcap: U128<LE>,
        /// Preferred write granularity, in logical blocks less one.
        pub npwg: U16<LE>,
        /// Preferred write alignment, in logical blocks less one.
        pub npwa: U16<LE>,
        /// Preferred deallocate granularity, in logical blocks less one.
        pub npdg: U16<LE>,
        /// Preferred deallocate alignment, in logical blocks less one.
        pub npda: U16<LE>,
        /// Optimal write size, in logical blocks less one.
        pub nows: U16<LE>,
        /// Copy: maximum source range length, in logical blocks.
        pub mssrl: U16<LE>,
        /// Copy: maximum copy length, in logical blocks.
        pub mcl: U32<LE>,
        /// Copy: maximum number of source ranges, less one.
        pub msrc: u8,
        pub reserved_81: [u8; 11] = 0,
        /// ANA group, or 0.
        pub anagrpid: U32<LE>,
        pub reserved_96: [u8; 3] = 0,
        /// Attributes: `NSATTR_*`.
        pub nsattr: u8,
        /// NVM set.
        pub nvmsetid: U16<LE>,
        /// Endurance group.
        pub endgid: U16<LE>,
        /// Namespace globally unique identifier, or zeroes.
        pub nguid: [u8; 16],
        /// IEEE extended unique identifier, or zeroes.
        pub eui64: [u8; 8],
        /// LBA formats.
        pub lbaf: [LbaFormat; 64],
        /// Vendor specific.
        pub vs: [u8; 3712],
    }

    /// One LBA format (NVM Command Set 1.0 figure 98).
    pub struct LbaFormat(4) {
        /// Metadata, in bytes.
        pub ms: U16<LE>,
        /// log2 of a logical block's size, in bytes.
        pub lbads: u8,
        /// Relative performance; 0 is best.
        pub rp: u8,
    }

    /// I/O Command Set Independent Identify Namespace (Base 2.0 figure 280).
    pub struct IdentifyNamespaceIndependent(IDENTIFY_LEN) {
        /// Features; bit 4: the unique identifiers may be reused.
        pub nsfeat: u8,
        /// As in [`IdentifyNamespace`].
        pub nmic: u8,
        /// As in [`IdentifyNamespace`].
        pub rescap: u8,
        /// As in [`IdentifyNamespace`].
        pub fpi: u8,
        /// As in [`IdentifyNamespace`].
        pub anagrpid: U32<LE>,
        /// As in [`IdentifyNamespace`].
        pub nsattr: u8,
        pub reserved_9: u8 = 0,
        /// NVM set.
        pub nvmsetid: U16<LE>,
        /// Endurance group.
        pub endgid: U16<LE>,
        /// Status: `NSTAT_*`.
        pub nstat: u8,
        pub reserved_15: [u8; 4081] = 0,
    }

    /// Identify Controller of the NVM Command Set (NVM Command Set 1.0 figure 101).
    pub struct IdentifyControllerNvm(IDENTIFY_LEN) {
        /// Verify: log2 of the maximum size, in units of CAP.MPSMIN; 0 for no limit.
        pub vsl: u8,
        /// Write Zeroes: log2 of the maximum size, in units of CAP.MPSMIN; 0 for no limit.
        pub wzsl: u8,
        /// Write Uncorrectable: log2 of the maximum size, in units of CAP.MPSMIN; 0 for no limit.
        pub wusl: u8,
        /// Dataset Management: ranges of one command; 0 is no limit.
        pub dmrl: u8,
        /// Dataset Management: logical blocks of one range; 0 is no limit.
        pub dmrsl: U32<LE>,
        /// Dataset Management: logical blocks of one command; 0 is no limit.
        pub dmsl: U64<LE>,
        pub reserved_16: [u8; 4080] = 0,
    }

    /// The header of a namespace identification descriptor; NIDL bytes follow (Base 2.0 figure
    /// 277).
    pub struct NamespaceDescriptor(4) {
        /// [`NamespaceIdType`]; 0 ends the list.
        pub nidt: u8,
        /// Length of the identifier, in bytes.
        pub nidl: u8,
        pub reserved: [u8; 2] = 0,
    }
}

open_enum! {
    /// NIDT (Base 2.0 figure 277).
    pub enum NamespaceIdType(u8) {
        /// IEEE extended unique identifier: 8 bytes.
        EUI64 = 1,
        /// Namespace globally unique identifier: 16 bytes.
        NGUID = 2,
        /// Namespace UUID: 16 bytes.
        UUID = 3,
        /// Command set identifier: 1 byte.
        CSI = 4,
    }

    /// CNTRLTYPE (Base 2.0 figure 276).
    pub enum ControllerType(u8) {
        /// Not reported, by controllers before NVMe 1.4.
        NOT_REPORTED = 0,
        /// I/O controller.
        IO = 1,
        /// Discovery controller.
        DISCOVERY = 2,
        /// Administrative controller.
        ADMINISTRATIVE = 3,
    }
}

/// Length of every Identify data structure, in bytes.
pub const IDENTIFY_LEN: usize = 4096;
/// Most namespaces of one list.
pub const NAMESPACE_LIST_MAX: usize = 1024;
/// Most controllers of one list.
pub const CONTROLLER_LIST_MAX: usize = 2047;

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;
    use zerocopy::FromBytes;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        assert_eq!(offset_of!(IdentifyController, cntlid), 78);
        assert_eq!(offset_of!(IdentifyController, cntrltype), 111);
        assert_eq!(offset_of!(IdentifyController, oacs), 256);
        assert_eq!(offset_of!(IdentifyController, kas), 320);
        assert_eq!(offset_of!(IdentifyController, anatt), 342);
        assert_eq!(offset_of!(IdentifyController, sqes), 512);
        assert_eq!(offset_of!(IdentifyController, sgls), 536);
        assert_eq!(offset_of!(IdentifyController, subnqn), 768);
        assert_eq!(offset_of!(IdentifyController, ioccsz), 1792);
        assert_eq!(offset_of!(IdentifyController, psd), 2048);
        assert_eq!(offset_of!(IdentifyNamespace, nvmcap), 48);
        assert_eq!(offset_of!(IdentifyNamespace, anagrpid), 92);
        assert_eq!(offset_of!(IdentifyNamespace, nguid), 104);
        assert_eq!(offset_of!(IdentifyNamespace, lbaf), 128);
    }

    /// The beginning of Identify Controller of the Linux 6.12 target.
    #[test]
    fn a_controller_reads_as_the_kernel_sent_it() {
        let mut bytes = [0; IDENTIFY_LEN];
        bytes[4..24].copy_from_slice(b"2a03b34f5b8d49d13f68");
        bytes[24..64].copy_from_slice(b"Linux                                   ");
        bytes[64..72].copy_from_slice(b"6.12.117");
        bytes[78..84].copy_from_slice(&[0x01, 0x00, 0x00, 0x03, 0x01, 0x00]);
        let controller = IdentifyController::ref_from_bytes(&bytes).unwrap();
        assert_eq!(&controller.sn, b"2a03b34f5b8d49d13f68");
        assert_eq!(&controller.fr, b"6.12.117");
        assert_eq!(controller.ver.get(), super::super::property::version(1, 3, 0));
        assert_eq!(controller.cntlid.get(), 1);
    }

    /// The beginning of Identify Namespace of the Linux 6.12 target, for 100 MiB with blocks of 4
    /// KiB.
    #[test]
    fn a_namespace_reads_as_the_kernel_sent_it() {
        let mut bytes = [0; IDENTIFY_LEN];
        bytes[..18].copy_from_slice(&[0, 0x90, 1, 0, 0, 0, 0, 0, 0, 0x90, 1, 0, 0, 0, 0, 0, 0, 0x90]);
        bytes[30] = NMIC_SHARED;
        bytes[92] = 1;
        bytes[130] = 12;
        let namespace = IdentifyNamespace::ref_from_bytes(&bytes).unwrap();
        assert_eq!((namespace.nsze.get(), namespace.ncap.get()), (0x19000, 0x19000));
        assert_eq!((namespace.nmic, namespace.anagrpid.get()), (NMIC_SHARED, 1));
        assert_eq!(namespace.lbaf[usize::from(namespace.flbas)].lbads, 12);
    }
}
