//! A device's own thread, which sleeps until there is work outside of requests.
//!
//! `poll (stop, notice, socket's end, queue errors, channel) → act;  connection gone → reconnect → act again`
//!
//! - All messages after the first connection come from this thread, so that no other thread waits for a lock
//!   while a back-end is slow; users' calls arrive as [`Command`]s.
//! - Requests never pass through this thread: queues and back-end share memory and eventfds.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tracing::{debug, warn};
use vhost_user::wait;

use super::connect::Session;
use super::info::Event;
use super::options::Reconnect;
use super::reconnect::{Kept, Restart};
use super::state::{Command, Thread};

use crate::error::{ConnectError, MemoryError, MessageError, in_a_line};
use crate::memory::UserMemory;

/// The longest sleep of a poll when nothing is scheduled.
const LONG: Duration = Duration::from_secs(3600);

/// Why a connection ended.
enum End {
    /// The device was dropped.
    Stop,
    /// The back-end closed the connection.
    Gone,
    /// The driver closed it: the back-end may still run and use the rings.
    Left,
}

impl End {
    fn of(error: &MessageError) -> Self {
        if matches!(error, MessageError::Closed { .. }) { Self::Gone } else { Self::Left }
    }
}

impl Thread {
    /// Runs until the device is dropped.
    pub(super) fn run(self, mut session: Session, mut kept: Kept) {
        let mut restart = None;
        let mut pace = super::reconnect::Pace::default();
        loop {
            pace.connected();
            match self.serve(&mut session, &mut restart) {
                End::Stop => return self.stop(session),
                End::Gone => drop(session),
                End::Left => {
                    drop(session);
                    kept.forget_log();
                }
            }
            if let Some(restart) = restart.take() {
                restart.report(&self);
            }
            self.shared.events.push(Event::Disconnected);
            let back = match self.options.reconnect {
                Reconnect::Never => {
                    let reason = "the program did not request reconnects (Options::reconnect)".to_owned();
                    self.shared.events.push(Event::GaveUp { reason });
                    None
                }
                Reconnect::For(limit) => self.reconnect(limit, &mut pace, &mut kept),
            };
            let Some((back, how)) = back else { return self.wait_for_stop() };
            (session, restart) = (back, Some(how));
        }
    }

    /// Ends the queues once the back-end has released their buffers or the time limit has passed.
    fn stop(&self, session: Session) {
        if let Err(error) = session.close() {
            warn!("the back-end may still use the driver's memory: {}", in_a_line(&error));
        }
        self.give_up();
    }

    /// Waits without a back-end until the device is dropped.
    fn wait_for_stop(&self) {
        self.give_up();
        while !self.pause_until(Instant::now() + LONG, refuse) {}
    }

    fn serve(&self, session: &mut Session, restart: &mut Option<Restart>) -> End {
        loop {
            *restart = restart.take().and_then(|restart| restart.report_if_due(self));
            let due = restart.as_ref().map_or_else(|| Instant::now() + LONG, Restart::due);
            let Ok(woken) = self.sleep(session, due) else { return End::Left };
            if woken.stop {
                return End::Stop;
            }
            if woken.gone {
                debug!("the back-end closed the connection");
                return End::Gone;
            }
            if let Err(error) = self.act(session, &woken) {
                warn!("the driver ends the connection: {}", in_a_line(&error));
                return End::of(&error);
            }
            if woken.queue_error {
                warn!("the back-end cannot continue with a queue, so the driver ends the connection");
                return End::Left;
            }
        }
    }

    fn sleep(&self, session: &Session, due: Instant) -> io::Result<Woken> {
        let channel = session.channel.as_ref();
        let mut fds = [
            PollFd::new(&*self.shared.stop, PollFlags::IN),
            PollFd::new(&*self.shared.notice, PollFlags::IN),
            // The thread does not poll the socket for reading: the next message detects an unexpected answer.
            PollFd::from_borrowed_fd(session.socket(), PollFlags::RDHUP),
            PollFd::new(&self.err, PollFlags::IN),
            PollFd::from_borrowed_fd(
                channel.map_or(self.shared.stop.as_fd(), super::channel::Channel::fd),
                PollFlags::IN,
            ),
        ];
        wait(&mut fds, Some(due))?;
        let [stop, notice, gone, queue_error, channel_ready] = fds.map(|fd| !fd.revents().is_empty());
        if notice {
            self.shared.notice.clear();
        }
        if queue_error {
            self.err.clear();
        }
        Ok(Woken { stop, gone, queue_error, notice, channel: channel_ready && channel.is_some() })
    }

    fn act(&self, session: &mut Session, woken: &Woken) -> Result<(), MessageError> {
        if woken.channel {
            self.listen(session)?;
        }
        if woken.notice {
            self.stop_ended_queues(session)?;
            while let Ok(command) = self.commands.try_recv() {
                self.execute(session, command)?;
            }
        }
        Ok(())
    }

    /// Handles the back-end's requests on its channel.
    fn listen(&self, session: &mut Session) -> Result<(), MessageError> {
        let Some(channel) = &mut session.channel else { return Ok(()) };
        let (changed, going_on) = channel.take();
        if let Err(error) = going_on {
            warn!("the driver closes the back-end's channel: {}", in_a_line(&error));
            session.channel = None;
        }
        if changed { self.refresh_info(session) } else { Ok(()) }
    }

    fn refresh_info(&self, session: &mut Session) -> Result<(), MessageError> {
        match session.read_info() {
            Ok(info) => {
                session.info.clone_from(&info);
                self.shared.set_info(&info);
                Ok(())
            }
            Err(ConnectError::Message(error)) => Err(error),
            Err(error) => {
                warn!("the driver ignores the changed configuration: {}", in_a_line(&error));
                Ok(())
            }
        }
    }

    /// Stops queues that were dropped or whose ring the device broke, so that the back-end releases their buffers.
    fn stop_ended_queues(&self, session: &mut Session) -> Result<(), MessageError> {
        for (queue, link) in (0_u16..).zip(&self.links) {
            if self.is_stopped() {
                // The device was dropped: `stop` ends all queues together, within one time limit.
                return Ok(());
            }
            if link.is_dropped() || link.is_broken() {
                session.stop_queue(queue)?;
            }
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        wait(&mut [PollFd::new(&*self.shared.stop, PollFlags::IN)], Some(Instant::now()))
            .is_ok_and(|ready| ready > 0)
    }

    fn execute(&self, session: &mut Session, command: Command) -> Result<(), MessageError> {
        match command {
            Command::Register(memory, answer) => {
                let (result, fatal) = split(self.register(session, memory));
                let _ = answer.send(result);
                fatal
            }
            Command::Unregister(addr, answer) => match self.withdraw(addr) {
                Ok(region) => {
                    let told = session.remove_region(&region);
                    // If the message cannot be sent, the connection ends, and with it the back-end's access to the
                    // memory.
                    let _ = answer.send(Ok(()));
                    told
                }
                Err(error) => {
                    let _ = answer.send(Err(error));
                    Ok(())
                }
            },
        }
    }

    fn register(&self, session: &mut Session, memory: UserMemory) -> Result<(), MemoryError> {
        let region = self.map.add_user(memory)?;
        let told = session.add_region(&region);
        if told.is_err() {
            self.map.remove(region.spec().user_addr)?;
        } else {
            self.map.open(&region);
        }
        told
    }
}

/// The events that ended a poll.
struct Woken {
    stop: bool,
    gone: bool,
    queue_error: bool,
    notice: bool,
    channel: bool,
}

fn refuse(command: Command) {
    let (Command::Register(_, answer) | Command::Unregister(_, answer)) = command;
    let _ = answer.send(Err(MemoryError::Disconnected));
}

/// Splits a result into the user's answer and the state of the connection.
fn split(result: Result<(), MemoryError>) -> (Result<(), MemoryError>, Result<(), MessageError>) {
    match result {
        Err(MemoryError::Message(error)) if !error.is_refusal() => {
            (Err(MemoryError::Disconnected), Err(error))
        }
        other => (other, Ok(())),
    }
}
