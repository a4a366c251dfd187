//! One member, with a cluster that does at once what it is asked, or does not answer.

use blockmux_group::table::ConfiguredVolume;
use blockmux_group::{
    Action, Beat, Client, Command, CommandId, Epoch, Event, Generation, Incarnation, Member, Outcome, Place,
    Refusal, RequestId, Settings, Table,
};
use std::time::Duration;

/// A member, the table that is stored, and the actions that the test does itself.
struct Bench {
    member: Member,
    now: Duration,
    stored: Option<Table>,
    clients: u64,
    /// How often another member has started.
    others: u64,
    /// What becomes of the next proposals; they are committed if it is empty.
    outcomes: Vec<Outcome>,
    /// Whether the cluster answers.
    is_reached: bool,
    actions: Vec<Action>,
}

impl Bench {
    fn new() -> Bench {
        let mut bench = Bench {
            member: Member::new("a", "host:1", settings()),
            now: Duration::ZERO,
            stored: None,
            clients: 0,
            others: 0,
            outcomes: Vec::new(),
            is_reached: true,
            actions: Vec::new(),
        };
        bench.event(Event::Tick);
        bench
    }

    /// A member of a group with one volume, which it serves.
    fn serving() -> (Bench, Epoch) {
        let mut bench = Bench::new();
        bench.command(configure());
        let [Action::Activate { volume, epoch }] = &bench.take()[..] else { panic!("nothing to activate") };
        let (volume, epoch) = (volume.clone(), *epoch);
        bench.event(Event::Activated { volume, epoch });
        assert!(matches!(bench.place(), Place::Active(_)));
        (bench, epoch)
    }

    /// A member of a group with these volumes, which it serves.
    fn serving_all(names: &[&str]) -> Bench {
        let mut bench = Bench::new();
        let volumes = names.iter().map(|name| ConfiguredVolume::new(name, "image")).collect();
        bench.command(Command::Configure { version: 1, volumes });
        for action in bench.take() {
            let Action::Activate { volume, epoch } = action else { panic!("{action:?}") };
            bench.event(Event::Activated { volume, epoch });
        }
        bench
    }

    fn event(&mut self, event: Event) {
        self.member.handle(self.now, event);
        while let Some(action) = self.member.poll() {
            let answer = match action {
                _ if !self.is_reached && !matches!(action, Action::EndIo | Action::Answer { .. }) => None,
                Action::Connect => {
                    self.clients += 1;
                    Some(Event::Connected { client: client_of_a(self.clients) })
                }
                Action::Watch => Some(Event::Watching),
                Action::Read { request } => Some(Event::TableRead { request, table: self.stored.clone() }),
                Action::Propose { request, table } => Some(self.propose(request, table)),
                Action::Beat(beat) => Some(Event::Beat(beat)),
                Action::Answer { result: Ok(()), .. } => None,
                action => {
                    self.actions.push(action);
                    None
                }
            };
            if let Some(answer) = answer {
                self.member.handle(self.now, answer);
            }
        }
    }

    fn propose(&mut self, request: RequestId, table: Table) -> Event {
        let outcome = if self.outcomes.is_empty() { Outcome::Committed } else { self.outcomes.remove(0) };
        if outcome == Outcome::Committed {
            let before = self.stored.as_ref().map(Table::generation).unwrap_or_default();
            assert_eq!(table.generation(), Generation(before.0 + 1));
            self.stored = Some(table);
        }
        Event::Proposed { request, outcome }
    }

    /// Lets time pass; the other member, if there is one, beats as often.
    fn pass(&mut self, ticks: u32, other: Option<Incarnation>) {
        for _ in 0..ticks {
            self.now += settings().beat_every;
            if let Some(incarnation) = other {
                let count = self.now.as_millis() as u64;
                self.event(Event::Beat(Beat { incarnation, count, generation: Generation(0) }));
            }
            self.event(Event::Tick);
        }
    }

    fn command(&mut self, command: Command) {
        self.event(Event::Command { id: CommandId(1), command });
    }

    /// Another member starts, perhaps again, and hears only itself for some ticks.
    fn other(&mut self, ticks: u32) -> Incarnation {
        let mut other = Bench { member: Member::new("b", "host:2", settings()), ..Bench::new() };
        self.others += 1;
        (other.stored, other.clients) = (self.stored.clone(), 100 * self.others);
        other.event(Event::Tick);
        other.pass(ticks, None);
        self.stored = other.stored;
        self.event(Event::Changed { generation: self.stored.as_ref().unwrap().generation() });
        other.member.incarnation().unwrap()
    }

    fn place(&self) -> Place {
        self.place_of("v")
    }

    fn place_of(&self, volume: &str) -> Place {
        self.stored.as_ref().unwrap().volume(volume).unwrap().place
    }

    /// The actions that nobody has done.
    fn take(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }
}

fn client_of_a(number: u64) -> Client {
    Client(format!("192.0.2.1:0/{number}"))
}

fn settings() -> Settings {
    Settings { stable_after: 20, ..Settings::default() }
}

fn configure() -> Command {
    Command::Configure { version: 1, volumes: vec![ConfiguredVolume::new("v", "image")] }
}

fn drain(member: &str) -> Command {
    Command::Drain { member: member.to_owned() }
}

#[test]
fn the_first_member_makes_the_table_and_serves_what_a_config_names() {
    let (mut bench, epoch) = Bench::serving();
    assert_eq!((epoch, bench.take()), (Epoch(1), vec![]));
    let table = bench.stored.clone().unwrap();
    bench.pass(1000, None);
    assert_eq!(bench.stored, Some(table), "nothing changes without a reason");
}

#[test]
fn a_proposal_without_an_answer_is_looked_up_and_made_again() {
    let mut bench = Bench::new();
    bench.outcomes = vec![Outcome::Unknown, Outcome::Stale, Outcome::Unknown];
    bench.command(configure());
    assert!(bench.stored.as_ref().unwrap().volumes().is_empty());
    bench.pass(10, None);
    assert_eq!(bench.take(), [Action::Activate { volume: "v".to_owned(), epoch: Epoch(1) }]);
}

#[test]
fn an_older_table_is_ignored_and_not_asked_for_without_end() {
    let (mut bench, _) = Bench::serving();
    let known = bench.stored.take().unwrap();
    bench.outcomes = vec![Outcome::Stale; 1000];
    bench.command(drain("a"));
    bench.pass(20, None);
    assert_eq!(bench.take(), []);
    assert_eq!(bench.member.table(), Some(&known));
    assert!(bench.outcomes.len() > 980, "{} were asked", 1000 - bench.outcomes.len());
    // The command is forgotten, and somebody restores the table.
    bench.pass(10, None);
    let answer = Action::Answer { id: CommandId(1), result: Err(Refusal::Unconfirmed) };
    assert_eq!(bench.take(), [answer]);
    (bench.stored, bench.outcomes) = (Some(known), Vec::new());
    bench.command(drain("a"));
    assert!(bench.stored.as_ref().unwrap().member("a").unwrap().is_draining);
}

#[test]
fn a_volume_moves_when_its_owner_has_released_it() {
    let (mut bench, epoch) = Bench::serving();
    let b = bench.other(0);
    bench.pass(25, Some(b));
    bench.command(drain("a"));
    assert_eq!(bench.take(), [Action::Deactivate { volume: "v".to_owned(), epoch }]);
    bench.pass(25, Some(b));
    assert_eq!(bench.place(), Place::Leaving { from: bench.member.incarnation().unwrap(), to: Some(b) });
    bench.event(Event::Deactivated { volume: "v".to_owned(), epoch });
    assert_eq!(bench.place(), Place::Starting(b));
    assert_eq!(bench.take(), []);
}

#[test]
fn a_member_that_leaves_gives_its_volumes_to_nobody_if_it_is_alone_and_has_them_when_it_is_back() {
    let (mut bench, epoch) = Bench::serving();
    bench.command(Command::Leave { member: "a".to_owned() });
    assert_eq!(bench.take(), [Action::Deactivate { volume: "v".to_owned(), epoch }]);
    bench.event(Event::Deactivated { volume: "v".to_owned(), epoch });
    bench.pass(1000, None);
    assert_eq!((bench.place(), bench.take()), (Place::Free, vec![]));
    bench.event(Event::OwnClientFenced);
    assert_eq!(bench.take(), [Action::EndIo, Action::Activate { volume: "v".to_owned(), epoch: Epoch(2) }]);
    assert_eq!(bench.stored.as_ref().unwrap().to_fence(), []);
}

#[test]
fn a_member_that_leaves_gives_its_volumes_to_another_one() {
    let (mut bench, epoch) = Bench::serving();
    let b = bench.other(0);
    bench.pass(2, Some(b));
    bench.command(Command::Leave { member: "a".to_owned() });
    assert_eq!(bench.take(), [Action::Deactivate { volume: "v".to_owned(), epoch }]);
    bench.event(Event::Deactivated { volume: "v".to_owned(), epoch });
    bench.pass(2, Some(b));
    assert_eq!(bench.place(), Place::Starting(b), "although it was not heard for long");
}

#[test]
fn all_volumes_of_a_member_that_leaves_or_drains_move_at_once() {
    for command in [Command::Leave { member: "a".to_owned() }, drain("a")] {
        let mut bench = Bench::serving_all(&["v", "w", "x"]);
        let b = bench.other(0);
        bench.pass(2, Some(b));
        // One of them is already on its way, and does not end.
        bench.command(Command::Pin { volume: "w".to_owned(), member: "b".to_owned() });
        bench.pass(30, Some(b));
        assert_eq!(bench.take().len(), 1);
        bench.command(command);
        let to_b = Place::Leaving { from: bench.member.incarnation().unwrap(), to: Some(b) };
        assert_eq!(["v", "w", "x"].map(|name| bench.place_of(name)), [to_b; 3]);
        assert_eq!(bench.take().len(), 2);
    }
}

#[test]
fn a_volume_that_its_owner_does_not_release_holds_up_no_other_one_for_ever() {
    let mut bench = Bench::serving_all(&["v", "w", "x", "y"]);
    let b = bench.other(0);
    bench.pass(25, Some(b));
    let leaving: Vec<&str> = ["v", "w", "x", "y"]
        .into_iter()
        .filter(|name| matches!(bench.place_of(name), Place::Leaving { .. }))
        .collect();
    let [stuck] = leaving[..] else { panic!("{leaving:?}") };
    let other = if stuck == "v" { "w" } else { "v" };
    bench.command(Command::Pin { volume: other.to_owned(), member: "b".to_owned() });
    bench.pass(15, Some(b));
    assert!(matches!(bench.place_of(stuck), Place::Leaving { .. }));
    assert!(matches!(bench.place_of(other), Place::Leaving { .. }), "{:?}", bench.place_of(other));
}

#[test]
fn a_member_that_is_not_heard_is_given_nothing_and_left_alone() {
    let (mut bench, _) = Bench::serving();
    let b = bench.other(0);
    bench.command(Command::Pin { volume: "v".to_owned(), member: "b".to_owned() });
    let table = bench.stored.clone();
    bench.pass(1000, None);
    assert!(bench.member.suspects(b));
    assert_eq!((bench.take(), &bench.stored), (vec![], &table));
}

#[test]
fn a_silent_member_with_volumes_is_fenced_before_they_start() {
    let (mut bench, epoch) = Bench::serving();
    let a = bench.member.incarnation().unwrap();
    bench.other(6);
    // It has not heard the first one, whose volume it takes.
    let Place::Starting(b) = bench.place() else { panic!("{:?}", bench.place()) };
    assert_ne!(a, b);
    // The first one has joined again, and fences its own client as everybody does.
    let clients = vec![client_of_a(1)];
    assert_eq!(bench.take(), [Action::EndIo, Action::Fence { clients: clients.clone() }]);
    assert_eq!(bench.stored.as_ref().unwrap().to_fence(), clients);
    assert!(bench.member.incarnation().unwrap() > b && bench.take().is_empty());
    bench.pass(1, Some(b));
    // What was asked of the client before means nothing.
    bench.event(Event::Lost { volume: "v".to_owned(), epoch });
    assert_eq!(bench.place(), Place::Starting(b));
}

#[test]
fn a_volume_starts_once_every_client_that_may_write_is_fenced() {
    let (mut bench, _) = Bench::serving();
    bench.event(Event::OwnClientFenced);
    let clients = vec![client_of_a(1)];
    assert_eq!(bench.take(), [Action::EndIo, Action::Fence { clients: clients.clone() }]);
    bench.event(Event::FenceFailed { clients: clients.clone() });
    bench.pass(5, None);
    assert_eq!(bench.take(), [Action::Fence { clients: clients.clone() }]);
    bench.event(Event::ClientsFenced { clients });
    assert_eq!(bench.take(), [Action::Activate { volume: "v".to_owned(), epoch: Epoch(2) }]);
    assert_eq!(bench.stored.as_ref().unwrap().to_fence(), []);
}

#[test]
fn a_member_that_does_not_reach_the_cluster_ends_its_io_and_suspects_nobody() {
    let (mut bench, _) = Bench::serving();
    let b = bench.other(0);
    bench.is_reached = false;
    bench.pass(20, None);
    assert!(!bench.member.suspects(b));
    assert_eq!(bench.take(), []);
    bench.pass(10, None);
    assert_eq!((bench.take(), bench.member.incarnation()), (vec![Action::EndIo], None));
}

#[test]
fn a_failed_activation_is_tried_again_later_and_a_lost_volume_in_another_epoch() {
    let (mut bench, epoch) = Bench::serving();
    let volume = || "v".to_owned();
    bench.event(Event::Lost { volume: volume(), epoch });
    assert_eq!(bench.take(), []);
    bench.pass(5, None);
    assert_eq!(bench.take(), [Action::Activate { volume: volume(), epoch: Epoch(2) }]);
    bench.event(Event::ActivationFailed { volume: volume(), epoch: Epoch(2) });
    assert_eq!(bench.take(), []);
    bench.pass(5, None);
    assert_eq!(bench.take(), [Action::Activate { volume: volume(), epoch: Epoch(2) }]);
}

#[test]
fn a_volume_that_does_not_start_is_tried_less_and_less_often_until_an_operator_decides() {
    let mut bench = Bench::new();
    bench.command(configure());
    // How often it is tried within a time, of which each ends in this way.
    let tries = |bench: &mut Bench, ticks: u32, end: fn(String, Epoch) -> Event| {
        (0..ticks).fold(0, |tries, _| {
            let actions = bench.take();
            for action in &actions {
                let Action::Activate { volume, epoch } = action.clone() else { panic!("{action:?}") };
                bench.event(end(volume, epoch));
            }
            bench.pass(1, None);
            tries + actions.len()
        })
    };
    let failed = |volume, epoch| Event::ActivationFailed { volume, epoch };
    let at_first = tries(&mut bench, 500, failed);
    assert!((5..12).contains(&at_first), "{at_first} in 100 s");
    assert_eq!(tries(&mut bench, 140, failed), 1);
    bench.command(Command::Pin { volume: "v".to_owned(), member: "a".to_owned() });
    assert!(tries(&mut bench, 10, failed) >= 2);
    bench.command(Command::Unpin { volume: "v".to_owned() });
    // What is not the volume's fault does not count.
    let not_begun = |volume, epoch| Event::ActivationNotBegun { volume, epoch };
    assert!(tries(&mut bench, 500, not_begun) > 100);
}

#[test]
fn who_was_fenced_is_fenced_again_after_a_volume_has_become_active() {
    let (mut bench, _) = Bench::serving();
    bench.event(Event::OwnClientFenced);
    let clients = vec![client_of_a(1)];
    bench.event(Event::ClientsFenced { clients: clients.clone() });
    bench.take();
    bench.pass(50, None);
    assert_eq!(bench.take(), []);
    bench.event(Event::Activated { volume: "v".to_owned(), epoch: Epoch(2) });
    assert_eq!(bench.take(), []);
    bench.pass(50, None);
    assert_eq!(bench.take(), [Action::FenceAgain { clients }]);
    // Nothing waits for it, and it is not done without end.
    assert!(matches!(bench.place(), Place::Active(_)));
    bench.pass(5000, None);
    assert_eq!(bench.take(), []);
    let epoch = Epoch(2);
    bench.event(Event::Lost { volume: "v".to_owned(), epoch });
    bench.pass(10, None);
    bench.event(Event::Activated { volume: "v".to_owned(), epoch: Epoch(3) });
    bench.pass(50, None);
    assert_eq!(bench.take(), [Action::Activate { volume: "v".to_owned(), epoch: Epoch(3) }]);
}

#[test]
fn two_processes_with_one_name_end_each_other_less_and_less_often() {
    let mut bench = Bench::new();
    bench.event(Event::Tick);
    let is_member = |bench: &Bench| {
        bench.stored.as_ref().unwrap().member("a").map(|member| member.incarnation)
            == bench.member.incarnation()
    };
    let mut ticks_until_it_joins = Vec::new();
    for number in 1..5 {
        // An honest restart does not wait.
        let mut rival = Bench { clients: 1000 * number, ..Bench::new() };
        rival.stored = bench.stored.clone();
        rival.member = Member::new("a", "host:1", settings());
        rival.event(Event::Tick);
        assert!(is_member(&rival));
        bench.stored = rival.stored;
        bench.event(Event::Changed { generation: bench.stored.as_ref().unwrap().generation() });
        let is_named = bench.member.rival().is_some();
        let ticks = (0..2000).find(|_| {
            let is_done = is_member(&bench);
            bench.pass(1, None);
            is_done
        });
        assert_eq!((is_named, bench.member.rival()), (number > 1, None));
        ticks_until_it_joins.push(ticks.unwrap());
    }
    assert_eq!(ticks_until_it_joins, [0, 25, 50, 100]);
}

#[test]
fn a_member_with_strikes_waits_longer_for_its_volumes() {
    let ticks_until_a_volume = |strikes: u32| {
        let mut bench = Bench::new();
        let volumes = ["v", "w"].map(|name| ConfiguredVolume::new(name, "image")).to_vec();
        bench.command(Command::Configure { version: 1, volumes });
        for action in bench.take() {
            let Action::Activate { volume, epoch } = action else { continue };
            bench.event(Event::Activated { volume, epoch });
        }
        for _ in 0..strikes {
            // The other one is given a volume, and starts again while it has it.
            let b = bench.other(0);
            bench.command(Command::Pin { volume: "v".to_owned(), member: "b".to_owned() });
            bench.pass(400, Some(b));
            for action in bench.take() {
                let Action::Deactivate { volume, epoch } = action else { continue };
                bench.event(Event::Deactivated { volume, epoch });
            }
            assert_eq!(bench.place(), Place::Starting(b));
            bench.command(Command::Unpin { volume: "v".to_owned() });
            bench.other(0);
            for _ in 0..2 {
                for action in bench.take() {
                    match action {
                        Action::Fence { clients } => bench.event(Event::ClientsFenced { clients }),
                        Action::Activate { volume, epoch } => bench.event(Event::Activated { volume, epoch }),
                        _ => {}
                    }
                }
            }
        }
        let b = bench.other(0);

        let is_leaving = |bench: &Bench| {
            let table = bench.stored.as_ref().unwrap();
            table.volumes().iter().any(|volume| volume.place.next_owner() == Some(b))
        };
        (0..1000).find(|_| {
            bench.pass(1, Some(b));
            is_leaving(&bench)
        })
    };
    let [none, one, two] = [0, 1, 2].map(|strikes| ticks_until_a_volume(strikes).unwrap());
    assert!(one >= none + 20 && two >= none + 60, "{none} {one} {two}");
}

#[test]
fn commands_are_answered_and_refused_by_those_who_are_no_members() {
    let mut bench = Bench::new();
    bench.command(drain("x"));
    let refused = Err(Refusal::UnknownMember("x".to_owned()));
    assert_eq!(bench.take(), [Action::Answer { id: CommandId(1), result: refused }]);
    bench.is_reached = false;
    bench.event(Event::OwnClientFenced);
    bench.command(drain("a"));
    let refused = Action::Answer { id: CommandId(1), result: Err(Refusal::NotMember) };
    assert_eq!(bench.take(), [Action::EndIo, refused]);
}
