//! PERSISTENT RESERVE IN and OUT: parameter data (SPC-5).

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// The basic PERSISTENT RESERVE OUT parameter list; with [`SPEC_I_PT`] TransportIDs follow.
    pub struct ReserveOut(24) {
        /// RESERVATION KEY.
        pub reservation_key: U64<BE>,
        /// SERVICE ACTION RESERVATION KEY.
        pub service_action_reservation_key: U64<BE>,
        /// Obsolete.
        pub obsolete: [u8; 4],
        /// [`SPEC_I_PT`], [`ALL_TG_PT`], [`APTPL`].
        pub flags: u8,
        /// Reserved and obsolete.
        pub reserved: [u8; 3],
    }

    /// The parameter list of REGISTER AND MOVE; a TransportID follows.
    pub struct RegisterAndMove(24) {
        /// RESERVATION KEY.
        pub reservation_key: U64<BE>,
        /// SERVICE ACTION RESERVATION KEY.
        pub service_action_reservation_key: U64<BE>,
        pub reserved: u8 = 0,
        /// [`UNREG`] and [`APTPL`].
        pub flags: u8,
        /// RELATIVE TARGET PORT IDENTIFIER.
        pub relative_target_port_identifier: U16<BE>,
        /// TRANSPORTID PARAMETER DATA LENGTH, in bytes.
        pub transport_id_length: U32<BE>,
    }

    /// Header of READ KEYS, READ RESERVATION and READ FULL STATUS data.
    pub struct ReserveInHeader(8) {
        /// PRGENERATION.
        pub generation: U32<BE>,
        /// ADDITIONAL LENGTH: bytes that follow.
        pub additional_length: U32<BE>,
    }

    /// Reservation descriptor of READ RESERVATION.
    pub struct ReservationDescriptor(16) {
        /// RESERVATION KEY; 0 if all registrants hold the reservation.
        pub reservation_key: U64<BE>,
        /// Obsolete and reserved.
        pub obsolete: [u8; 5],
        /// SCOPE and TYPE.
        pub scope_and_type: u8,
        /// Obsolete.
        pub obsolete_too: [u8; 2],
    }

    /// REPORT CAPABILITIES data.
    pub struct Capabilities(8) {
        /// LENGTH: 8.
        pub length: U16<BE>,
        /// CRH, [`SIP_C`], [`ATP_C`], [`PTPL_C`].
        pub flags_2: u8,
        /// [`TMV`], ALLOW COMMANDS, [`PTPL_A`].
        pub flags_3: u8,
        /// PERSISTENT RESERVATION TYPE MASK.
        pub type_mask: U16<BE>,
        pub reserved: [u8; 2] = 0,
    }

    /// One registration in READ FULL STATUS; its TransportID follows.
    pub struct FullStatusDescriptor(24) {
        /// RESERVATION KEY.
        pub reservation_key: U64<BE>,
        pub reserved: [u8; 4] = 0,
        /// ALL_TG_PT and [`R_HOLDER`].
        pub flags: u8,
        /// SCOPE and TYPE of the holder's reservation.
        pub scope_and_type: u8,
        pub reserved_too: [u8; 4] = 0,
        /// RELATIVE TARGET PORT IDENTIFIER.
        pub relative_target_port_identifier: U16<BE>,
        /// ADDITIONAL DESCRIPTOR LENGTH: bytes of TransportID.
        pub additional_descriptor_length: U32<BE>,
    }
}

open_enum! {
    /// TYPE of a persistent reservation (SPC-5).
    pub enum ScsiReservationType(u8) {
        /// Only the holder may write.
        WRITE_EXCLUSIVE = 0x1,
        /// Only the holder may read and write.
        EXCLUSIVE_ACCESS = 0x3,
        /// Only registrants may write.
        WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 0x5,
        /// Only registrants may read and write.
        EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 0x6,
        /// Only registrants may write; all of them hold the reservation.
        WRITE_EXCLUSIVE_ALL_REGISTRANTS = 0x7,
        /// Only registrants may read and write; all of them hold the reservation.
        EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 0x8,
    }
}

impl ScsiReservationType {
    /// Whether every registered nexus holds the reservation.
    #[must_use]
    pub const fn is_all_registrants(self) -> bool {
        matches!(self, Self::WRITE_EXCLUSIVE_ALL_REGISTRANTS | Self::EXCLUSIVE_ACCESS_ALL_REGISTRANTS)
    }

    /// Whether every registered nexus has access.
    #[must_use]
    pub const fn admits_registrants(self) -> bool {
        self.is_all_registrants()
            || matches!(
                self,
                Self::WRITE_EXCLUSIVE_REGISTRANTS_ONLY | Self::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY
            )
    }

    /// Whether unregistered nexuses may read.
    #[must_use]
    pub const fn is_write_exclusive(self) -> bool {
        matches!(
            self,
            Self::WRITE_EXCLUSIVE
                | Self::WRITE_EXCLUSIVE_REGISTRANTS_ONLY
                | Self::WRITE_EXCLUSIVE_ALL_REGISTRANTS
        )
    }
}

/// SPEC_I_PT: also register the listed initiator ports.
pub const SPEC_I_PT: u8 = 1 << 3;
/// ALL_TG_PT: register on all target ports.
pub const ALL_TG_PT: u8 = 1 << 2;
/// APTPL: activate persist through power loss.
pub const APTPL: u8 = 1 << 0;
/// UNREG, REGISTER AND MOVE: unregister the requesting nexus.
pub const UNREG: u8 = 1 << 1;
/// [`SPEC_I_PT`] is supported.
pub const SIP_C: u8 = 1 << 3;
/// [`ALL_TG_PT`] is supported.
pub const ATP_C: u8 = 1 << 2;
/// [`APTPL`] is supported.
pub const PTPL_C: u8 = 1 << 0;
/// The type mask is valid.
pub const TMV: u8 = 1 << 7;
/// [`APTPL`] is active.
pub const PTPL_A: u8 = 1 << 0;
/// All types: WR_EX_AR, EX_AC_RO, WR_EX_RO, EX_AC, WR_EX and EX_AC_AR.
pub const TYPE_MASK_ALL: u16 = 0xea01;
/// The registration is a reservation holder.
pub const R_HOLDER: u8 = 1 << 0;
