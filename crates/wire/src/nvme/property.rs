//! Controller properties, which are registers where there is a bus (Base 2.0 §3.1.3).

/// Offset of CAP, controller capabilities: 8 bytes.
pub const CAP: u32 = 0x00;
/// Offset of VS, version: 4 bytes.
pub const VS: u32 = 0x08;
/// Offset of CC, controller configuration: 4 bytes.
pub const CC: u32 = 0x14;
/// Offset of CSTS, controller status: 4 bytes.
pub const CSTS: u32 = 0x1c;
/// Offset of NSSR, NVM subsystem reset: 4 bytes.
pub const NSSR: u32 = 0x20;
/// Offset of CRTO, controller ready timeouts: 4 bytes.
pub const CRTO: u32 = 0x68;

/// CAP.MQES: the most entries of a queue, less one.
pub const CAP_MQES_MASK: u64 = 0xffff;
/// CAP.CQR: queues are contiguous; always so over fabrics.
pub const CAP_CQR: u64 = 1 << 16;
/// CAP.TO begins here: eight bits, in units of 500 ms.
pub const CAP_TO_SHIFT: u32 = 24;
/// CAP.CSS: the NVM Command Set.
pub const CAP_CSS_NVM: u64 = 1 << 37;
/// CAP.CSS: I/O command sets are to be identified.
pub const CAP_CSS_IOCSS: u64 = 1 << 43;
/// CAP.CRMS: ready independent of media.
pub const CAP_CRMS_CRWMS: u64 = 1 << 59;

/// CC.EN.
pub const CC_EN: u32 = 1;
/// CC.CSS: three bits from bit 4. 0 the NVM Command Set, 6 all that there are, 7 admin commands
/// only.
pub const CC_CSS_SHIFT: u32 = 4;
/// CC.CSS: all I/O command sets.
pub const CC_CSS_ALL: u32 = 6;
/// CC.CSS: no I/O commands.
pub const CC_CSS_ADMIN: u32 = 7;
/// CC.MPS: four bits, log2 of the host's page size, less 12.
pub const CC_MPS_SHIFT: u32 = 7;
/// CC.AMS: three bits.
pub const CC_AMS_SHIFT: u32 = 11;
/// CC.SHN: two bits.
pub const CC_SHN_SHIFT: u32 = 14;
/// CC.SHN: a normal shutdown.
pub const CC_SHN_NORMAL: u32 = 1;
/// CC.SHN: an abrupt one.
pub const CC_SHN_ABRUPT: u32 = 2;
/// CC.IOSQES: four bits, log2 of a submission queue entry's size.
pub const CC_IOSQES_SHIFT: u32 = 16;
/// CC.IOCQES: four bits, log2 of a completion queue entry's size.
pub const CC_IOCQES_SHIFT: u32 = 20;

/// CSTS.RDY.
pub const CSTS_RDY: u32 = 1;
/// CSTS.CFS: the controller has failed.
pub const CSTS_CFS: u32 = 1 << 1;
/// CSTS.SHST: two bits.
pub const CSTS_SHST_SHIFT: u32 = 2;
/// CSTS.SHST: a shutdown is under way.
pub const CSTS_SHST_OCCURRING: u32 = 1;
/// CSTS.SHST: the shutdown is done.
pub const CSTS_SHST_COMPLETE: u32 = 2;

/// A version as VS has it.
#[must_use]
pub const fn version(major: u16, minor: u8, tertiary: u8) -> u32 {
    (major as u32) << 16 | (minor as u32) << 8 | tertiary as u32
}
