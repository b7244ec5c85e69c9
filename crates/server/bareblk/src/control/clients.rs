//! The list of clients: limits their number, makes room for a new one, and ends their connections.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::limits::MAX_ENDING;
use super::protocol::answer::{ErrorKind, Fault};

/// One client's connection.
#[derive(Debug)]
pub struct Client {
    pub stream: UnixStream,
    state: Mutex<State>,
    /// `end` has changed.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    has_spoken: bool,
    /// Why the server ended the connection; sent as its last line.
    end: Option<End>,
}

/// Why the server, not the client, ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    MadeRoom,
    Stop,
}

impl End {
    pub fn fault(self) -> Fault {
        match self {
            Self::MadeRoom => Fault::new(
                ErrorKind::MadeRoom,
                "this client never sent a request and was disconnected to make room for another: connect again",
            ),
            Self::Stop => Fault::new(ErrorKind::Stopping, "the server is stopping"),
        }
    }
}

impl Client {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the client has sent a request.
    pub fn spoke(&self) {
        self.state().has_spoken = true;
    }

    /// Why the server ended the connection, if it did.
    pub fn end(&self) -> Option<End> {
        self.state().end
    }

    /// Waits on the client's thread, at most until the server ends the connection.
    pub fn pause(&self, time: Duration) {
        let _ = self.ended.wait_timeout_while(self.state(), time, |state| state.end.is_none());
    }

    /// Wakes the client's thread, which then reads no further request and finds `end`.
    fn tell(&self, end: End) {
        self.state().end.get_or_insert(end);
        self.ended.notify_all();
        // Fails if the client has disconnected, which has the same effect.
        let _ = self.stream.shutdown(Shutdown::Read);
    }

    fn is_silent(&self) -> bool {
        let state = self.state();
        !state.has_spoken && state.end.is_none()
    }
}

/// All clients, in the order in which they connected.
#[derive(Debug)]
pub struct Clients {
    /// Maximum number of connected clients.
    max: usize,
    all: Mutex<Vec<Arc<Client>>>,
    gone: Condvar,
    /// Connections that stay open until the server has stopped, because their end tells the clients so.
    until_stopped: Mutex<Vec<Arc<Client>>>,
}

impl Clients {
    pub fn new(max: usize) -> Self {
        Self { max, all: Mutex::default(), gone: Condvar::new(), until_stopped: Mutex::default() }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client, or returns its connection if there is no room. At the limit, disconnects the oldest client that
    /// never sent a request, so that forgotten connections do not keep the operator out.
    pub fn add(&self, stream: UnixStream) -> Result<Arc<Client>, UnixStream> {
        let mut all = self.all();
        if all.len() >= self.max {
            let silent = all.iter().find(|client| client.is_silent());
            match silent {
                Some(client) if all.len() < self.max + MAX_ENDING => client.tell(End::MadeRoom),
                _ => return Err(stream),
            }
        }
        let client = Arc::new(Client { stream, state: Mutex::default(), ended: Condvar::new() });
        all.push(Arc::clone(&client));
        Ok(client)
    }

    pub fn forget(&self, client: &Arc<Client>) {
        self.all().retain(|known| !Arc::ptr_eq(known, client));
        self.gone.notify_all();
    }

    /// Keeps the connection open until the server has stopped.
    pub fn keep_until_stopped(&self, client: &Arc<Client>) {
        self.until_stopped.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(client));
    }

    /// Ends all clients and waits for their threads. False if some took longer than `timeout`.
    pub fn end_all(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut all = self.all();
        all.iter().for_each(|client| client.tell(End::Stop));
        while !all.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.gone.wait_timeout(all, left);
            all = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::MAX_CLIENTS;
    use super::*;

    fn connection() -> UnixStream {
        UnixStream::pair().unwrap().0
    }

    #[test]
    fn client_above_the_limit_takes_the_place_of_the_oldest_silent_one() {
        let clients = Clients::new(MAX_CLIENTS);
        let all: Vec<_> = (0..MAX_CLIENTS).map(|_| clients.add(connection()).unwrap()).collect();
        all[0].spoke();
        assert!(clients.add(connection()).is_ok());
        assert_eq!([all[0].end(), all[1].end(), all[2].end()], [None, Some(End::MadeRoom), None]);
    }

    #[test]
    fn client_above_the_limit_is_refused_when_all_others_have_spoken() {
        let clients = Clients::new(MAX_CLIENTS);
        let all: Vec<_> = (0..MAX_CLIENTS).map(|_| clients.add(connection()).unwrap()).collect();
        all.iter().for_each(|client| client.spoke());
        assert!(clients.add(connection()).is_err());
        clients.forget(&all[0]);
        assert!(clients.add(connection()).is_ok());
    }

    #[test]
    fn clients_that_are_ending_are_not_unlimited_either() {
        let clients = Clients::new(MAX_CLIENTS);
        let taken = (0..1000).filter(|_| clients.add(connection()).is_ok()).count();
        assert_eq!(taken, MAX_CLIENTS + MAX_ENDING);
    }

    #[test]
    fn end_of_all_does_not_wait_for_ever_for_one_that_stays() {
        let clients = Clients::new(MAX_CLIENTS);
        let client = clients.add(connection()).unwrap();
        assert!(!clients.end_all(Duration::from_millis(1)));
        assert_eq!(client.end(), Some(End::Stop));
        clients.forget(&client);
        assert!(clients.end_all(Duration::ZERO));
    }
}
