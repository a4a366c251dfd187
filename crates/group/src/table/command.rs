//! What operators decide: changes of the table that any member proposes for them.

use super::{Decision, MAX_VOLUMES, Place, Refusal, Table, VolumeRecord, check_text};

/// A change that an operator wants. Applied twice, it changes nothing the second time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A member serves a volume, while it can. The volume moves there without an error.
    Pin {
        /// The volume.
        volume: String,
        /// The member.
        member: String,
    },
    /// Any member may serve the volume.
    Unpin {
        /// The volume.
        volume: String,
    },
    /// The member's volumes move to others.
    Drain {
        /// The member.
        member: String,
    },
    /// The member is about to end: its volumes move to others, or to nobody if there are none,
    /// until it joins again.
    Leave {
        /// The member.
        member: String,
    },
    /// The member may have volumes again, and its failures are forgotten.
    Resume {
        /// The member.
        member: String,
    },
    /// The member is cut from the cluster now; others take its volumes over.
    Fence {
        /// The member.
        member: String,
    },
    /// The group serves these volumes, too.
    Add {
        /// The volumes.
        volumes: Vec<ConfiguredVolume>,
    },
    /// Nobody serves the volume any longer, and the group forgets it.
    Retire {
        /// The volume.
        volume: String,
    },
    /// The group serves these volumes and no others.
    Configure {
        /// Higher than all before.
        version: u64,
        /// The volumes.
        volumes: Vec<ConfiguredVolume>,
    },
}

/// A volume of the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredVolume {
    /// Its name.
    pub name: String,
    /// What it is.
    pub image: String,
}

impl ConfiguredVolume {
    /// A volume with a name, and what it is.
    #[must_use]
    pub fn new(name: &str, image: &str) -> ConfiguredVolume {
        ConfiguredVolume { name: name.to_owned(), image: image.to_owned() }
    }
}

impl Table {
    /// Changes the table as a command says, or not at all.
    ///
    /// # Errors
    /// If the command does not fit the table.
    pub fn apply(&mut self, command: &Command) -> Result<(), Refusal> {
        match command {
            Command::Pin { volume, member } => {
                let known = self.member(member).ok_or_else(|| Refusal::UnknownMember(member.clone()))?;
                if !known.is_up {
                    return Err(Refusal::Down(member.clone()));
                }
                self.decide(volume, Decision::Pinned(member.clone()))
            }
            Command::Unpin { volume } => self.decide(volume, Decision::Spread),
            Command::Drain { member } => self.change_member(member, |member| member.is_draining = true),
            Command::Leave { member } => self.change_member(member, |member| member.is_leaving = true),
            Command::Resume { member } => self.change_member(member, |member| {
                member.is_draining = false;
                member.is_leaving = false;
                member.strikes = 0;
            }),
            Command::Fence { member } => {
                let known = self.member(member).ok_or_else(|| Refusal::UnknownMember(member.clone()))?;
                if known.is_up { self.end(known.incarnation) } else { Ok(()) }
            }
            Command::Add { volumes } => self.add(volumes),
            Command::Retire { volume } => self.decide(volume, Decision::Retired),
            Command::Configure { version, volumes } => self.configure(*version, volumes),
        }
    }

    fn decide(&mut self, name: &str, decision: Decision) -> Result<(), Refusal> {
        let volume = self.volume_mut(name).filter(|volume| volume.decision != Decision::Retired);
        volume.ok_or_else(|| Refusal::UnknownVolume(name.to_owned()))?.decision = decision;
        Ok(())
    }

    fn change_member(
        &mut self,
        name: &str,
        change: impl FnOnce(&mut super::MemberRecord),
    ) -> Result<(), Refusal> {
        let member = self.members.iter_mut().find(|member| member.name == name);
        change(member.ok_or_else(|| Refusal::UnknownMember(name.to_owned()))?);
        Ok(())
    }

    fn add(&mut self, volumes: &[ConfiguredVolume]) -> Result<(), Refusal> {
        let mut next = self.volumes.clone();
        for volume in next.iter_mut().filter(|own| volumes.iter().any(|given| given.name == own.name)) {
            if volume.decision == Decision::Retired {
                volume.decision = Decision::Spread;
            }
        }
        self.volumes = with_all(next, volumes)?;
        Ok(())
    }

    fn configure(&mut self, version: u64, volumes: &[ConfiguredVolume]) -> Result<(), Refusal> {
        let mut next = self.volumes.clone();
        for volume in &mut next {
            volume.decision = match (&volume.decision, volumes.iter().any(|given| given.name == volume.name))
            {
                (_, false) => Decision::Retired,
                (Decision::Retired, true) => Decision::Spread,
                (decision, true) => decision.clone(),
            };
        }
        let next = with_all(next, volumes)?;
        let is_new = version > self.config_version;
        if !is_new && (version < self.config_version || next != self.volumes) {
            return Err(Refusal::OldConfig { has: self.config_version, given: version });
        }
        (self.config_version, self.volumes) = (version, next);
        Ok(())
    }
}

/// These records, and new ones for the volumes that have none.
fn with_all(
    mut records: Vec<VolumeRecord>,
    volumes: &[ConfiguredVolume],
) -> Result<Vec<VolumeRecord>, Refusal> {
    for ConfiguredVolume { name, image } in volumes {
        check_text(name)?;
        check_text(image)?;
        match records.binary_search_by(|volume| volume.name.cmp(name)) {
            Ok(at) if records.get(at).is_some_and(|volume| volume.image != *image) => {
                return Err(Refusal::OtherImage(name.clone()));
            }
            Ok(_) => {}
            Err(at) => records.insert(at, VolumeRecord::new(name, image)),
        }
    }
    if records.len() > MAX_VOLUMES {
        return Err(Refusal::Full { what: "volumes", limit: MAX_VOLUMES });
    }
    Ok(records)
}

impl VolumeRecord {
    fn new(name: &str, image: &str) -> VolumeRecord {
        VolumeRecord {
            name: name.to_owned(),
            image: image.to_owned(),
            epoch: super::Epoch(0),
            place: Place::Free,
            decision: Decision::Spread,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Client;
    use super::*;

    fn configure(version: u64, volumes: &[(&str, &str)]) -> Command {
        let volumes = volumes.iter().map(|(name, image)| ConfiguredVolume::new(name, image)).collect();
        Command::Configure { version, volumes }
    }

    #[test]
    fn a_config_adds_volumes_and_retires_those_that_it_lacks() {
        let mut table = Table::default();
        table.apply(&configure(1, &[("b", "2"), ("a", "1")])).unwrap();
        let owner = table.join("m", "address", &Client("c".to_owned())).unwrap();
        table.assign("a", owner);
        table.apply(&configure(2, &[("b", "2"), ("c", "3")])).unwrap();
        table.forget_retired();
        let decisions: Vec<_> =
            table.volumes().iter().map(|volume| (volume.name.as_str(), &volume.decision)).collect();
        assert_eq!(
            decisions,
            [("a", &Decision::Retired), ("b", &Decision::Spread), ("c", &Decision::Spread)]
        );
        let pin = Command::Pin { volume: "a".to_owned(), member: "m".to_owned() };
        assert_eq!(table.apply(&pin), Err(Refusal::UnknownVolume("a".to_owned())));
        // It is served until its owner has released it.
        table.leave("a", None);
        table.released("a");
        table.forget_retired();
        assert!(table.volume("a").is_none());
    }

    #[test]
    fn volumes_are_added_to_those_that_the_group_has_and_retired_one_by_one() {
        let add = |volumes: &[(&str, &str)]| {
            let volume = |(name, image): &(&str, &str)| ConfiguredVolume::new(name, image);
            Command::Add { volumes: volumes.iter().map(volume).collect() }
        };
        let retire = |volume: &str| Command::Retire { volume: volume.to_owned() };
        let mut table = Table::default();
        table.apply(&add(&[("b", "2")])).unwrap();
        table.apply(&add(&[("b", "2"), ("a", "1")])).unwrap();
        let before = table.clone();
        table.apply(&add(&[("a", "1")])).unwrap();
        assert_eq!(table, before);
        assert_eq!(table.apply(&add(&[("c", "3"), ("a", "2")])), Err(Refusal::OtherImage("a".to_owned())));
        assert_eq!(table, before);
        let owner = table.join("m", "address", &Client("c".to_owned())).unwrap();
        table.assign("a", owner);
        table.apply(&retire("a")).unwrap();
        assert_eq!(table.apply(&retire("a")), Err(Refusal::UnknownVolume("a".to_owned())));
        table.apply(&add(&[("a", "1")])).unwrap();
        assert_eq!(table.volume("a").unwrap().decision, Decision::Spread, "it was not released yet");
        table.apply(&retire("b")).unwrap();
        table.forget_retired();
        assert!(table.volume("b").is_none());
    }

    #[test]
    fn a_config_of_the_known_version_must_be_the_known_one() {
        let mut table = Table::default();
        table.apply(&configure(2, &[("a", "1")])).unwrap();
        table.apply(&configure(2, &[("a", "1")])).unwrap();
        let before = table.clone();
        for (version, volumes) in [(1, &[("a", "1")][..]), (2, &[]), (2, &[("a", "1"), ("b", "2")])] {
            let refused = table.apply(&configure(version, volumes));
            assert_eq!(refused, Err(Refusal::OldConfig { has: 2, given: version }));
        }
        let other = table.apply(&configure(3, &[("a", "2")]));
        assert_eq!(other, Err(Refusal::OtherImage("a".to_owned())));
        assert!(matches!(table.apply(&configure(3, &[("", "2")])), Err(Refusal::Length(_))));
        assert_eq!(table, before);
    }

    #[test]
    fn commands_about_what_does_not_exist_are_refused() {
        let mut table = Table::default();
        let unknown = || "x".to_owned();
        let member = Err(Refusal::UnknownMember(unknown()));
        assert_eq!(table.apply(&Command::Drain { member: unknown() }), member);
        assert_eq!(table.apply(&Command::Resume { member: unknown() }), member);
        assert_eq!(table.apply(&Command::Fence { member: unknown() }), member);
        assert_eq!(table.apply(&Command::Pin { volume: unknown(), member: unknown() }), member);
        let volume = Err(Refusal::UnknownVolume(unknown()));
        assert_eq!(table.apply(&Command::Unpin { volume: unknown() }), volume);
        let owner = table.join("m", "address", &Client("c".to_owned())).unwrap();
        table.apply(&Command::Fence { member: "m".to_owned() }).unwrap();
        assert!(table.up(owner).is_none());
        let pin = Command::Pin { volume: unknown(), member: "m".to_owned() };
        assert_eq!(table.apply(&pin), Err(Refusal::Down("m".to_owned())));
    }
}
