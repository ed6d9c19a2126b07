//! What one channel owns, behind the channel's lock: sockets, timers, streams and the events that wait to be reaped.
//!
//! Locks of this crate, in the only order in which one is taken while another is held:
//!
//! 1. the channel's (`ChannelShared`), around everything below;
//! 2. a block store's (`SharedBlocks`), around one step of a sequence;
//! 3. the device's (`DeviceShared::table`), around STags and registered octets: event loops hold it side by side, for
//!    reading, around system calls too; who registers or revokes waits for them, alone. What is changed by readers (STags of
//!    sinks, the source of randomness, the list of what nothing holds any more) has a lock of its own each,
//!    taken last and alone.
//!
//! The lists of channels, of offloaded streams and of commands, the slot of the poller and an outbox are locked alone, or
//! last. No lock is held while `poll` waits, while a log
//! record is written and while a keepalive is dropped, since each of these may run foreign code.

use std::mem;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kbtp_proto::limits;
use kbtp_proto::own_maps::OwnMap;
use kbtp_proto::stream::Outgoing;

use crate::ahead::Ahead;
use crate::api::Event;
use crate::crew::{Crew, Outbox};
use crate::device::DeviceShared;
use crate::event_loop::{Poller, ReadyBuffer, TimerId, Timers, Token, split};
use crate::goodbye::Goodbye;
use crate::listener::{Incoming, ListenerState};
use crate::offload::Command;
use crate::options::Options;
use crate::request::Pending;
use crate::stream_state::StreamState;
use crate::tcp::Link;
use crate::verbs_listener::VerbsListener;

/// What a time limit beyond the clock's end is cut to.
pub(crate) const LONGEST_TIMER: Duration = Duration::from_secs(365 * 24 * 3600);

/// What epoll takes for certain; whoever waits goes round again for more.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Looks at the socket of the stream that was busy last between two at all of them, while a loop spins.
const PROBES: usize = 8;

pub(crate) const LOG_TARGET: &str = "kbtp.rnic";

/// Lock whatever a panic in another thread has left: every state here is whole between two statements that matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A channel as its handles see it.
pub(crate) struct ChannelShared {
    pub(crate) device: Arc<DeviceShared>,
    /// None once closed.
    core: Mutex<Option<Core>>,
    /// Apart from `core`, so that `wake` never waits for a turn of the loop. None once closed.
    poller: Mutex<Option<Arc<Poller>>>,
    /// Where events go if a thread of the channel's own does its I/O.
    outbox: Option<Arc<Outbox>>,
    crew: OnceLock<Weak<Crew>>,
    /// From other channels, and threads that hold no lock; shared with `core`.
    commands: Arc<Mutex<Vec<Command>>>,
}

impl ChannelShared {
    /// With an `outbox`, someone else has to run the loop.
    pub(crate) fn open(device: Arc<DeviceShared>, outbox: Option<Arc<Outbox>>) -> std::io::Result<Arc<Self>> {
        let poller = Arc::new(Poller::new()?);
        let commands = Arc::new(Mutex::new(Vec::new()));
        Ok(Arc::new_cyclic(|me| Self {
            core: Mutex::new(Some(Core::new(
                Arc::clone(&device),
                Weak::clone(me),
                Arc::clone(&poller),
                Arc::clone(&commands),
                outbox.clone(),
            ))),
            poller: Mutex::new(Some(poller)),
            device,
            outbox,
            crew: OnceLock::new(),
            commands,
        }))
    }

    /// Run `act` under the lock; None if the channel is closed.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut Core) -> R) -> Option<R> {
        let (result, logs) = {
            let mut core = lock(&self.core);
            let core = core.as_mut()?;
            core.now = Instant::now();
            let result = act(core);
            if let Some(outbox) = &self.outbox {
                outbox.push(&mut core.events);
            }
            (result, mem::take(&mut core.logs))
        };
        self.leave(logs);
        Some(result)
    }

    pub(crate) fn poller(&self) -> Option<Arc<Poller>> {
        lock(&self.poller).clone()
    }

    /// Have `command` obeyed in the next turn.
    pub(crate) fn command(&self, command: Command) {
        lock(&self.commands).push(command);
        if let Some(poller) = self.poller() {
            poller.wake();
        }
    }

    pub(crate) fn join_crew(&self, crew: &Arc<Crew>) {
        self.crew.get_or_init(|| Arc::downgrade(crew));
    }

    /// The loop that the next accepted stream goes to: another one of the crew, if there is one.
    pub(crate) fn next_loop(self: &Arc<Self>) -> Arc<Self> {
        let crew = self.crew.get().and_then(Weak::upgrade);
        crew.and_then(|crew| crew.next_loop())
            .unwrap_or_else(|| Arc::clone(self))
    }

    pub(crate) fn close(&self) {
        let core = lock(&self.core).take();
        let Some(mut core) = core else { return };
        core.close_sources();
        // Whoever still waits in `poll` finds the channel closed.
        core.poller.wake();
        lock(&self.poller).take();
        if let Some(outbox) = &self.outbox {
            outbox.wake();
        }
        let logs = mem::take(&mut core.logs);
        drop(core);
        self.leave(logs);
    }

    fn leave(&self, logs: Vec<(log::Level, String)>) {
        for (level, message) in logs {
            log::log!(target: LOG_TARGET, level, "{message}");
        }
        self.device.bury();
    }
}

impl Drop for ChannelShared {
    fn drop(&mut self) {
        self.close();
    }
}

/// Everything that has a socket or a timer.
pub(crate) enum Source {
    Listener(ListenerState),
    VerbsListener(VerbsListener),
    Incoming(Incoming),
    Request(Pending),
    Stream(Box<StreamState>),
    Goodbye(Goodbye),
}

pub(crate) struct Core {
    pub(crate) device: Arc<DeviceShared>,
    pub(crate) me: Weak<ChannelShared>,
    /// When this hold of the lock began: the time of all that happens under it.
    pub(crate) now: Instant,
    pub(crate) timers: Timers,
    /// Whoever is at work takes itself out, and puts itself back if it goes on.
    pub(crate) sources: OwnMap<Token, Source>,
    /// Shared by all sockets: nobody keeps octets in it beyond one turn.
    pub(crate) staging: Vec<u8>,
    /// Empty, and shared by all streams: where the next FPDUs are built.
    pub(crate) outgoing: Outgoing,
    poller: Arc<Poller>,
    events: Vec<Event>,
    /// Connect requests that are rejected unless they are answered before the next `poll`.
    questions: Vec<Token>,
    logs: Vec<(log::Level, String)>,
    /// Events were reaped without a look at the sockets; not twice in a row.
    hurried: bool,
    /// The stream that octets came for last: while the loop spins, its socket is looked at first.
    pub(crate) busy_stream: Option<Token>,
    /// For the streams of this loop.
    pub(crate) ahead: Ahead,
    /// Somebody is within `poll`, which may be waiting.
    polling: bool,
    /// Somebody is at work here, and looks at the events afterwards.
    in_turn: bool,
    commands: Arc<Mutex<Vec<Command>>>,
    /// Present if a thread of the channel's own does the turns; whoever holds the lock otherwise is another one.
    outbox: Option<Arc<Outbox>>,
}

impl Core {
    fn new(
        device: Arc<DeviceShared>,
        me: Weak<ChannelShared>,
        poller: Arc<Poller>,
        commands: Arc<Mutex<Vec<Command>>>,
        outbox: Option<Arc<Outbox>>,
    ) -> Self {
        Self {
            device,
            me,
            now: Instant::now(),
            timers: Timers::default(),
            sources: OwnMap::default(),
            staging: vec![0; limits::RNIC_READ_BUFFER_BYTES],
            outgoing: Outgoing::default(),
            poller,
            events: Vec::new(),
            questions: Vec::new(),
            logs: Vec::new(),
            hurried: false,
            busy_stream: None,
            ahead: Ahead::default(),
            polling: false,
            in_turn: false,
            commands,
            outbox,
        }
    }

    pub(crate) fn options(&self) -> &Options {
        &self.device.options
    }

    pub(crate) fn has_threads(&self) -> bool {
        self.outbox.is_some()
    }

    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    /// The epoll file descriptor, which from now on shows events that were reported outside `poll` too.
    pub(crate) fn show(&self) -> RawFd {
        let fd = self.poller.show();
        if !self.events.is_empty() {
            self.poller.wake();
        }
        fd
    }

    /// Be told when the socket of `link` is ready for what is asked for; replaces what was asked before.
    pub(crate) fn watch(&mut self, link: &mut Link, token: Token, read: bool, write: bool) {
        if let Err(error) = link.watch(&self.poller, token, read, write) {
            self.log(
                log::Level::Error,
                format!("{}: the system does not watch the socket: {error}", link.peer),
            );
        }
    }

    pub(crate) fn start_timer(&mut self, delay: Duration, token: Token) -> TimerId {
        let now = Instant::now();
        let at = now.checked_add(delay).unwrap_or_else(|| now + LONGEST_TIMER);
        if self.outbox.is_some() && !self.in_turn {
            self.poller.wake(); // the loop may have gone to sleep for longer
        }
        self.timers.start(at, token)
    }

    /// Queue `event` for the next `poll`; the file descriptor shows it if this is not inside one. With threads it goes to
    /// the outbox when the lock is let go.
    pub(crate) fn report(&mut self, event: Event) {
        self.events.push(event);
        let somebody_looks = self.polling || self.poller.is_shown();
        if !self.in_turn && somebody_looks && self.events.len() == 1 {
            self.poller.wake();
        }
    }

    /// Make the owner's `poll` return, though there may be nothing to report.
    pub(crate) fn wake_owner(&self) {
        match &self.outbox {
            Some(outbox) => outbox.wake(),
            None => self.poller.wake(),
        }
    }

    /// Report the connect request `token`, and see to it that it gets an answer.
    pub(crate) fn ask(&mut self, token: Token, question: Event) {
        if self.outbox.is_none() {
            self.questions.push(token);
        }
        self.report(question);
    }

    /// Written once the lock is free.
    pub(crate) fn log(&mut self, level: log::Level, message: String) {
        // Not `log_enabled`, which asks the logger: that may wait for whoever waits for us.
        if level <= log::max_level() {
            self.logs.push((level, message));
        }
    }

    /// Run `act` on the stream `token`; None if it has ended.
    pub(crate) fn with_stream<R>(
        &mut self,
        token: Token,
        act: impl FnOnce(&mut StreamState, &mut Self) -> R,
    ) -> Option<R> {
        let mut stream = match self.sources.remove(&token)? {
            Source::Stream(stream) => stream,
            other => {
                self.sources.insert(token, other);
                return None;
            }
        };
        let result = act(&mut stream, self);
        if !stream.has_ended() {
            self.sources.insert(token, Source::Stream(stream));
        }
        Some(result)
    }

    // --- polling ---

    pub(crate) fn begin_poll(&mut self) {
        self.polling = true;
        self.in_turn = true;
        for token in mem::take(&mut self.questions) {
            Pending::reject_unanswered(self, token);
        }
        self.in_turn = false;
    }

    /// Reap events of what the owner posted, if there are any, the sockets had their turn since the last time, and no wake
    /// is to be taken.
    pub(crate) fn reap_at_once(&mut self, into: &mut Vec<Event>) -> bool {
        self.hurried = !self.hurried && !self.events.is_empty() && !self.poller.is_woken();
        if self.hurried {
            self.reap(into);
        }
        self.hurried
    }

    /// Look for octets on the stream that they came for last, some times, which is faster than to ask which sockets are
    /// ready; true if something came of it.
    pub(crate) fn probe(&mut self) -> bool {
        self.in_turn = true;
        let mut came = false;
        for _ in 0..PROBES {
            let Some(token) = self.busy_stream.take() else { break };
            let lives = self
                .with_stream(token, |stream, core| stream.on_ready(core, true))
                .is_some();
            came = self.busy_stream.is_some() || !self.events.is_empty();
            if came {
                break;
            }
            self.busy_stream = lives.then_some(token);
            self.fetch_ahead();
        }
        self.in_turn = false;
        came
    }

    /// Fetch some of what will be needed next; false if there is none.
    pub(crate) fn fetch_ahead(&mut self) -> bool {
        !self.ahead.is_empty() && self.ahead.fetch(&self.device.table().memories)
    }

    pub(crate) fn next_timeout(&mut self) -> Option<Duration> {
        if !self.events.is_empty() {
            return Some(Duration::ZERO);
        }
        self.next_timer()
    }

    /// How long until the next timer is due.
    pub(crate) fn next_timer(&mut self) -> Option<Duration> {
        self.timers.next().map(|at| at.saturating_duration_since(self.now))
    }

    /// One round over what is ready and due; true if there is something to reap.
    pub(crate) fn turn(&mut self, ready: &ReadyBuffer) -> bool {
        self.in_turn = true;
        let woken = ready.woken();
        if woken {
            self.poller.take_wake();
        }
        if woken {
            let commands = mem::take(&mut *lock(&self.commands));
            for command in commands {
                self.obey(command);
            }
        }
        for (token, readable) in ready.sockets() {
            self.dispatch(token, readable);
        }
        while let Some((timer, token)) = self.timers.pop_due(self.now) {
            self.fire(timer, token);
        }
        self.in_turn = false;
        woken || !self.events.is_empty()
    }

    /// End of a poll: move the events to `into`, whose allocation is used for the next ones.
    pub(crate) fn reap(&mut self, into: &mut Vec<Event>) {
        self.polling = false;
        into.clear();
        mem::swap(&mut self.events, into);
    }

    fn dispatch(&mut self, token: Token, readable: bool) {
        let (token, managed) = split(token);
        match self.sources.remove(&token) {
            Some(Source::VerbsListener(listener)) => listener.on_ready(self, token),
            Some(Source::Listener(listener)) => listener.on_ready(self, token),
            Some(Source::Incoming(incoming)) => incoming.on_ready(self, token),
            Some(Source::Goodbye(goodbye)) => goodbye.on_ready(self, token, readable),
            Some(stream @ Source::Stream(_)) => {
                self.sources.insert(token, stream);
                self.with_stream(token, |stream, core| {
                    stream.notified(managed);
                    stream.on_ready(core, readable);
                });
            }
            Some(request @ Source::Request(_)) => {
                self.sources.insert(token, request);
            }
            // An earlier one of this round has closed it.
            None => {}
        }
    }

    fn fire(&mut self, timer: TimerId, token: Token) {
        match self.sources.remove(&token) {
            Some(Source::Listener(listener)) => listener.resume(self, token),
            Some(Source::Incoming(incoming)) => incoming.timed_out(self, token),
            Some(Source::Goodbye(goodbye)) => goodbye.close_now(self),
            Some(stream @ Source::Stream(_)) => {
                self.sources.insert(token, stream);
                self.with_stream(token, |stream, core| stream.on_timer(core, timer));
            }
            Some(other @ (Source::Request(_) | Source::VerbsListener(_))) => {
                self.sources.insert(token, other);
            }
            None => {}
        }
    }

    /// As `Channel::close`.
    fn close_sources(&mut self) {
        self.in_turn = true; // nobody will reap what is reported now
        for token in self.sources.keys().copied().collect::<Vec<_>>() {
            self.with_stream(token, StreamState::abort);
        }
        for (_, source) in mem::take(&mut self.sources) {
            if let Source::Goodbye(goodbye) = source {
                goodbye.close_now(self);
            }
        }
        self.events.clear();
    }
}
