//! Bits of the fields of Identify data structures, by the names of their fields.

/// CMIC: more than one port.
pub const CMIC_MULTI_PORT: u8 = 1;
/// CMIC: more than one controller.
pub const CMIC_MULTI_CONTROLLER: u8 = 1 << 1;
/// CMIC: asymmetric namespace access.
pub const CMIC_ANA: u8 = 1 << 3;
/// ANACAP: the optimized state.
pub const ANACAP_OPTIMIZED: u8 = 1;
/// ANACAP: the non-optimized state.
pub const ANACAP_NON_OPTIMIZED: u8 = 1 << 1;
/// ANACAP: the inaccessible state.
pub const ANACAP_INACCESSIBLE: u8 = 1 << 2;
/// ANACAP: a namespace's group does not change while it is attached.
pub const ANACAP_FIXED_GROUPS: u8 = 1 << 6;
/// CTRATT: host identifiers of 128 bits.
pub const CTRATT_HOST_ID_128: u32 = 1;
/// CTRATT: traffic based Keep Alive.
pub const CTRATT_TBKAS: u32 = 1 << 6;
/// LPA: SMART for each namespace.
pub const LPA_SMART_PER_NAMESPACE: u8 = 1;
/// LPA: the commands supported and effects log.
pub const LPA_EFFECTS: u8 = 1 << 1;
/// LPA: Get Log Page has offsets.
pub const LPA_EXTENDED: u8 = 1 << 2;
/// ONCS: Compare.
pub const ONCS_COMPARE: u16 = 1;
/// ONCS: Dataset Management.
pub const ONCS_DATASET_MANAGEMENT: u16 = 1 << 2;
/// ONCS: Write Zeroes.
pub const ONCS_WRITE_ZEROES: u16 = 1 << 3;
/// ONCS: features can be saved and selected.
pub const ONCS_SAVE: u16 = 1 << 4;
/// ONCS: reservations.
pub const ONCS_RESERVATIONS: u16 = 1 << 5;
/// ONCS: Verify.
pub const ONCS_VERIFY: u16 = 1 << 7;
/// ONCS: Copy.
pub const ONCS_COPY: u16 = 1 << 8;
/// FUSES: compare and write.
pub const FUSES_COMPARE_AND_WRITE: u16 = 1;
/// VWC: a volatile write cache is present.
pub const VWC_PRESENT: u8 = 1;
/// VWC: a flush of all namespaces is not supported.
pub const VWC_NO_FLUSH_ALL: u8 = 0b10 << 1;
/// VWC: a flush of all namespaces is supported.
pub const VWC_FLUSH_ALL: u8 = 0b11 << 1;
/// SGLS: supported, without alignment requirements.
pub const SGLS_ALIGNED_ANY: u32 = 1;
/// SGLS: keyed data blocks.
pub const SGLS_KEYED: u32 = 1 << 2;
/// SGLS: an address may be an offset into the capsule.
pub const SGLS_OFFSET: u32 = 1 << 20;
/// SGLS: the transport's own data blocks.
pub const SGLS_TRANSPORT: u32 = 1 << 21;
/// OFCS: Disconnect of single I/O queues.
pub const OFCS_DISCONNECT: u16 = 1;
/// NSFEAT: thin provisioning; NUSE is valid.
pub const NSFEAT_THIN: u8 = 1;
/// NSFEAT: NAWUN, NAWUPF and NACWU are valid.
pub const NSFEAT_ATOMICS: u8 = 1 << 1;
/// NSFEAT: NPWG, NPWA, NPDG, NPDA and NOWS are valid.
pub const NSFEAT_OPTPERF: u8 = 1 << 4;
/// NMIC: several controllers may attach the namespace.
pub const NMIC_SHARED: u8 = 1;
/// NSATTR: write protected.
pub const NSATTR_WRITE_PROTECTED: u8 = 1;
/// DLFEAT: deallocated blocks read as zeroes.
pub const DLFEAT_ZEROES: u8 = 1;
/// DLFEAT: Write Zeroes supports DEAC.
pub const DLFEAT_WRITE_ZEROES_DEALLOCATES: u8 = 1 << 3;
/// RESCAP: reservations persist through power loss.
pub const RESCAP_PTPL: u8 = 1;
/// RESCAP: the six types of reservations.
pub const RESCAP_ALL_TYPES: u8 = 0x7e;
/// RESCAP: IEKEY as in Base 1.3 and later.
pub const RESCAP_IEKEY_1_3: u8 = 1 << 7;
/// NSTAT: ready.
pub const NSTAT_READY: u8 = 1;
