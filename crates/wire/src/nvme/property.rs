//! Controller properties, which are registers on PCIe (Base 2.0 §3.1.3).

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

/// Mask of CAP.MQES: most entries of a queue, less one.
pub const CAP_MQES_MASK: u64 = 0xffff;
/// CAP.CQR: queues are contiguous; always so over fabrics.
pub const CAP_CQR: u64 = 1 << 16;
/// Shift of CAP.TO: eight bits, in units of 500 ms.
pub const CAP_TO_SHIFT: u32 = 24;
/// CAP.CSS: the NVM Command Set.
pub const CAP_CSS_NVM: u64 = 1 << 37;
/// CAP.CSS: one or more I/O command sets, found by Identify.
pub const CAP_CSS_IOCSS: u64 = 1 << 43;
/// CAP.CRMS, bit CRWMS: the controller is ready only with its media.
pub const CAP_CRMS_CRWMS: u64 = 1 << 59;

/// CC.EN.
pub const CC_EN: u32 = 1;
/// Shift of CC.CSS: three bits. 0 is the NVM Command Set, 6 all supported I/O command sets, 7 admin
/// commands only.
pub const CC_CSS_SHIFT: u32 = 4;
/// CC.CSS: all I/O command sets.
pub const CC_CSS_ALL: u32 = 6;
/// CC.CSS: no I/O commands.
pub const CC_CSS_ADMIN: u32 = 7;
/// Shift of CC.MPS: four bits, log2 of the host's page size, less 12.
pub const CC_MPS_SHIFT: u32 = 7;
/// Shift of CC.AMS: three bits.
pub const CC_AMS_SHIFT: u32 = 11;
/// Shift of CC.SHN: two bits.
pub const CC_SHN_SHIFT: u32 = 14;
/// CC.SHN: a normal shutdown.
pub const CC_SHN_NORMAL: u32 = 1;
/// CC.SHN: an abrupt shutdown.
pub const CC_SHN_ABRUPT: u32 = 2;
/// Shift of CC.IOSQES: four bits, log2 of the submission queue entry size.
pub const CC_IOSQES_SHIFT: u32 = 16;
/// Shift of CC.IOCQES: four bits, log2 of the completion queue entry size.
pub const CC_IOCQES_SHIFT: u32 = 20;

/// CSTS.RDY.
pub const CSTS_RDY: u32 = 1;
/// CSTS.CFS: the controller has failed.
pub const CSTS_CFS: u32 = 1 << 1;
/// Shift of CSTS.SHST: two bits.
pub const CSTS_SHST_SHIFT: u32 = 2;
/// CSTS.SHST: shutdown is in progress.
pub const CSTS_SHST_OCCURRING: u32 = 1;
/// CSTS.SHST: shutdown is complete.
pub const CSTS_SHST_COMPLETE: u32 = 2;

/// Encodes a version as in VS.
#[must_use]
pub const fn version(major: u16, minor: u8, tertiary: u8) -> u32 {
    (major as u32) << 16 | (minor as u32) << 8 | tertiary as u32
}
