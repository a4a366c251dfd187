//! Reservations as bytes: the image that persists through power loss (APTPL, SPC-5), and the
//! snapshot for another process. An image contains the registrations and the reservation.

use super::reservations::{MAX_REGISTRATIONS, Registrant, Registration, Reservation, Reservations};
use blockmux_volume::Crc32c;
use blockmux_wire::scsi::reservation::ScsiReservationType;

/// An image that cannot be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReservationImageError {
    /// The data is not an image, or damaged.
    #[error("is damaged at byte {at}")]
    Damaged {
        /// Offset of the first invalid field, in bytes.
        at: usize,
    },
    /// The image was written by a later version of the program.
    #[error("is of version {version}, and this program knows {VERSION} and earlier ones")]
    Later {
        /// Version of the image format.
        version: u8,
    },
}

/// Writes an image:
/// ```text
/// magic 7 | version u8 | CRC-32C of all that follows u32
/// registrations u32 | type u8, or 0 | holder u32
/// { key u64 | length u16 | target port's name | length u16 | TransportID }...
/// ```
pub(crate) fn to_image(all: &Reservations) -> Vec<u8> {
    if !all.persists { Vec::new() } else { encode(all) }
}

/// Writes what [`from_snapshot`] reads: all reservations, whether they persist or not.
/// ```text
/// generation u32 | persists u8 | image
/// ```
pub(crate) fn to_snapshot(all: &Reservations) -> Vec<u8> {
    [&all.generation.to_be_bytes()[..], &[all.persists.into()], &encode(all)].concat()
}

fn encode(all: &Reservations) -> Vec<u8> {
    if all.registrations.is_empty() {
        return Vec::new();
    }
    let mut image = Vec::new();
    image.extend((all.registrations.len() as u32).to_be_bytes());
    let reservation = all.reservation.as_ref();
    image.push(reservation.map_or(0, |reservation| reservation.kind.0));
    // With an all-registrants type the first holder may be unregistered; any registrant serves.
    let holder = all.registrations.iter().position(|registration| {
        reservation.is_some_and(|reservation| reservation.holder == registration.who)
    });
    image.extend((holder.unwrap_or(0) as u32).to_be_bytes());
    for registration in &all.registrations {
        image.extend(registration.key.to_be_bytes());
        for name in [registration.who.port.as_bytes(), &*registration.who.initiator] {
            // The length of a TransportID has 16 bits, so names have at most 65,535 bytes.
            let len = u16::try_from(name.len()).unwrap_or(u16::MAX);
            image.extend(len.to_be_bytes());
            image.extend(name.get(..len.into()).unwrap_or(name));
        }
    }
    [&MAGIC[..], &[VERSION], &Crc32c::of(&image).value().to_be_bytes(), &image].concat()
}

/// Parses an image of [`to_image`].
pub(crate) fn from_image(image: &[u8]) -> Result<Reservations, ReservationImageError> {
    if image.is_empty() {
        return Ok(Reservations::default());
    }
    let mut reader = Reader { image, at: 0 };
    if reader.take::<7>()? != *MAGIC {
        return Err(ReservationImageError::Damaged { at: 0 });
    }
    let [version] = reader.take()?;
    if version > VERSION {
        return Err(ReservationImageError::Later { version });
    }
    let crc = u32::from_be_bytes(reader.take()?);
    if Crc32c::of(image.get(reader.at..).unwrap_or_default()).value() != crc {
        return Err(reader.error());
    }
    let count = u32::from_be_bytes(reader.take()?) as usize;
    let [kind] = reader.take()?;
    let holder = u32::from_be_bytes(reader.take()?) as usize;
    if count > MAX_REGISTRATIONS {
        return Err(reader.error());
    }
    let mut registrations = Vec::with_capacity(count);
    for _ in 0..count {
        let key = u64::from_be_bytes(reader.take()?);
        let port = str::from_utf8(reader.name()?).map_err(|_| reader.error())?.into();
        let initiator = reader.name()?.into();
        registrations.push(Registration { who: Registrant { initiator, port }, key });
    }
    let reservation = match (ScsiReservationType(kind), registrations.get(holder)) {
        (ScsiReservationType(0), _) => None,
        (kind, Some(holder)) if kind.name().is_some() => {
            Some(Reservation { kind, holder: holder.who.clone() })
        }
        _ => return Err(reader.error()),
    };
    if reader.at != image.len() {
        return Err(reader.error());
    }
    Ok(Reservations { generation: 0, registrations, reservation, persists: true })
}

/// Parses a snapshot of [`to_snapshot`].
pub(crate) fn from_snapshot(snapshot: &[u8]) -> Result<Reservations, ReservationImageError> {
    let mut reader = Reader { image: snapshot, at: 0 };
    let generation = u32::from_be_bytes(reader.take()?);
    let [persists] = reader.take()?;
    let all = from_image(snapshot.get(reader.at..).unwrap_or_default())?;
    Ok(Reservations { generation, persists: persists != 0, ..all })
}

struct Reader<'a> {
    image: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ReservationImageError> {
        let here = self.slice(N)?;
        here.try_into().map_err(|_| self.error())
    }

    fn name(&mut self) -> Result<&'a [u8], ReservationImageError> {
        let len = u16::from_be_bytes(self.take()?);
        self.slice(len.into())
    }

    fn slice(&mut self, len: usize) -> Result<&'a [u8], ReservationImageError> {
        let end = self.at.checked_add(len).ok_or(self.error())?;
        let here = self.image.get(self.at..end).ok_or(self.error())?;
        self.at = end;
        Ok(here)
    }

    fn error(&self) -> ReservationImageError {
        ReservationImageError::Damaged { at: self.at }
    }
}

const MAGIC: &[u8; 7] = b"bmux-pr";
const VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_state::Register;

    fn example() -> Reservations {
        let mut all = Reservations::default();
        for (key, name) in [(1, &b"first"[..]), (u64::MAX, b"x")] {
            let who = Registrant { initiator: name.into(), port: "iqn.2026-11.t:t,t,0x0007".into() };
            let registrants = [who.clone()];
            let what = Register { key: None, new_key: key, registrants: &registrants, persists: true };
            all.register(&who, &what).unwrap();
        }
        let holder = all.registrations[1].who.clone();
        all.reserve(&holder, u64::MAX, ScsiReservationType::EXCLUSIVE_ACCESS).unwrap();
        all
    }

    #[test]
    fn an_image_restores_everything_but_the_generation() {
        let all = example();
        assert_eq!(from_image(&to_image(&all)), Ok(Reservations { generation: 0, ..all }));
        assert_eq!(from_image(&[]), Ok(Reservations::default()));
        assert_eq!(to_image(&Reservations { persists: false, ..example() }), []);
    }

    #[test]
    fn an_nvme_host_keeps_its_nqn_and_identifier_in_an_image_and_in_a_snapshot() {
        for nqn in ["nqn.2026-11.t:h", ""] {
            let who = Registrant::of_nvme_host(nqn, [9; 16]);
            let registrants = std::slice::from_ref(&who);
            let mut all = Reservations::default();
            all.register(&who, &Register { key: None, new_key: 5, registrants, persists: true }).unwrap();
            assert_eq!(from_snapshot(&to_snapshot(&all)), Ok(all.clone()));
            let mut restored = from_image(&to_image(&all)).unwrap();
            assert_eq!(restored.key_of(&who), Some(5));
            // It is no record of an earlier version, also without an NQN.
            assert!(!restored.adopt_record_without_nqn(&Registrant::of_nvme_host("nqn.other", [9; 16])));
        }
    }

    #[test]
    fn a_snapshot_restores_everything_whether_it_persists_or_not() {
        for persists in [true, false] {
            let all = Reservations { generation: 7, persists, ..example() };
            assert_eq!(from_snapshot(&to_snapshot(&all)), Ok(all));
        }
        let none = Reservations { generation: 3, ..Reservations::default() };
        assert_eq!(from_snapshot(&to_snapshot(&none)), Ok(none));
        let snapshot = to_snapshot(&example());
        for len in (0..snapshot.len()).filter(|len| *len != 5) {
            assert!(from_snapshot(&snapshot[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_damaged_image_is_refused_wherever_it_ends() {
        let image = to_image(&example());
        for len in 1..image.len() {
            assert!(from_image(&image[..len]).is_err(), "{len} bytes");
        }
        assert!(from_image(&[&image[..], &[0]].concat()).is_err());
        for at in 0..image.len() {
            let mut image = image.clone();
            image[at] ^= 0x40;
            assert!(from_image(&image).is_err(), "byte {at}");
        }
    }

    #[test]
    fn an_image_that_makes_no_sense_is_refused_whatever_its_sum() {
        let image = to_image(&example());
        for at in 12..21 {
            let mut body = image[12..].to_vec();
            body[at - 12] = 0xff;
            let image = [&image[..8], &Crc32c::of(&body).value().to_be_bytes(), &body].concat();
            assert!(
                matches!(from_image(&image), Err(ReservationImageError::Damaged { at: 13.. })),
                "byte {at}"
            );
        }
    }

    #[test]
    fn an_image_of_a_later_version_is_recognized() {
        let mut image = to_image(&example());
        image[7] = 2;
        let error = from_image(&image).unwrap_err();
        assert_eq!(error.to_string(), "is of version 2, and this program knows 1 and earlier ones");
    }
}
