//! Reservations that survive a restart: APTPL (SPC-5 §5.13.5).
//!
//! The device server makes an image of the registrations and the reservation; a [`ReservationStore`] keeps it, in a
//! file or wherever the engine likes. No change is acknowledged before its image is kept.

use super::reservations::{MAX_REGISTRATIONS, Registrant, Registration, Reservation, Reservations};
use blockmux_wire::scsi::reservation::ReservationType;
use std::fmt;

/// Keeps the image of one volume's reservations.
///
/// Images come in the order of their tickets; the last one counts. `save` must not block: whatever takes time happens
/// elsewhere, and [`ReservationStore::is_saved`] tells when it is over. Called from any core.
pub trait ReservationStore: Send + Sync {
    /// Begins to replace what is kept by `image`; an empty one means that there is nothing to keep.
    fn save(&self, image: &[u8]) -> SaveTicket;

    /// Whether that image, or a later one, is on stable storage; `Some(false)` if it will never be.
    fn is_saved(&self, ticket: SaveTicket) -> Option<bool>;
}

/// Names one [`ReservationStore::save`]; they grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SaveTicket(pub u64);

/// An image that is none: nothing of it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an image of reservations, or a damaged one, at byte {at}")]
pub struct ImageError {
    /// Where it stops making sense.
    pub at: usize,
}

/// ```text
/// magic 8 | registrations u32 | type u8, or 0 | holder u32 | { key u64 | port u16 | length u32 | TransportID }...
/// ```
pub(super) fn to_image(all: &Reservations) -> Vec<u8> {
    if !all.persists || all.registrations.is_empty() {
        return Vec::new();
    }
    let mut image = MAGIC.to_vec();
    image.extend((all.registrations.len() as u32).to_be_bytes());
    let reservation = all.reservation.as_ref();
    image.push(reservation.map_or(0, |reservation| reservation.kind.0));
    // Of all registrants the one who took it may be gone; any will do.
    let holder = all.registrations.iter().position(|registration| {
        reservation.is_some_and(|reservation| reservation.holder == registration.who)
    });
    image.extend((holder.unwrap_or(0) as u32).to_be_bytes());
    for registration in &all.registrations {
        image.extend(registration.key.to_be_bytes());
        image.extend(registration.who.port.to_be_bytes());
        image.extend((registration.who.initiator.len() as u32).to_be_bytes());
        image.extend(&*registration.who.initiator);
    }
    image
}

/// What [`to_image`] made.
pub(super) fn from_image(image: &[u8]) -> Result<Reservations, ImageError> {
    if image.is_empty() {
        return Ok(Reservations::default());
    }
    let mut reader = Reader { image, at: 0 };
    if reader.take::<8>()? != *MAGIC {
        return Err(ImageError { at: 0 });
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
        let port = u16::from_be_bytes(reader.take()?);
        let len = u32::from_be_bytes(reader.take()?) as usize;
        let initiator = reader.slice(len)?.into();
        registrations.push(Registration { who: Registrant { initiator, port }, key });
    }
    let reservation = match (ReservationType(kind), registrations.get(holder)) {
        (ReservationType(0), _) => None,
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

struct Reader<'a> {
    image: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ImageError> {
        let here = self.slice(N)?;
        here.try_into().map_err(|_| self.error())
    }

    fn slice(&mut self, len: usize) -> Result<&'a [u8], ImageError> {
        let end = self.at.checked_add(len).ok_or(self.error())?;
        let here = self.image.get(self.at..end).ok_or(self.error())?;
        self.at = end;
        Ok(here)
    }

    fn error(&self) -> ImageError {
        ImageError { at: self.at }
    }
}

impl fmt::Debug for dyn ReservationStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReservationStore")
    }
}

const MAGIC: &[u8; 8] = b"bmx-pr-1";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::reservations::Register;

    fn example() -> Reservations {
        let mut all = Reservations::default();
        for (key, name) in [(1, &b"first"[..]), (u64::MAX, b"x")] {
            let who = Registrant { initiator: name.into(), port: 7 };
            let whom = [who.clone()];
            let what = Register { key: None, new_key: key, whom: &whom, persists: true };
            all.register(&who, &what).unwrap();
        }
        let holder = all.registrations[1].who.clone();
        all.reserve(&holder, u64::MAX, ReservationType::EXCLUSIVE_ACCESS).unwrap();
        all
    }

    #[test]
    fn an_image_brings_everything_back_but_the_generation() {
        let all = example();
        assert_eq!(from_image(&to_image(&all)), Ok(Reservations { generation: 0, ..all }));
        assert_eq!(from_image(&[]), Ok(Reservations::default()));
        assert_eq!(to_image(&Reservations { persists: false, ..example() }), []);
    }

    #[test]
    fn a_damaged_image_is_refused_wherever_it_ends() {
        let image = to_image(&example());
        for len in 1..image.len() {
            assert!(from_image(&image[..len]).is_err(), "{len} bytes");
        }
        assert!(from_image(&[&image[..], &[0]].concat()).is_err());
        for at in 8..17 {
            let mut image = image.clone();
            image[at] = 0xff;
            assert!(from_image(&image).is_err(), "byte {at}");
        }
    }
}
