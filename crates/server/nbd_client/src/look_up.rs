//! Looks up a host's addresses within a time limit. The C library has none: it may wait minutes for a name server.
//!
//! A look-up that takes too long continues on its thread. The next attempt for that host waits for it, so a name server
//! that never answers costs one thread for each host.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The look-ups that have not ended.
static RUNNING: Mutex<Option<HashMap<String, Arc<LookUp>>>> = Mutex::new(None);

/// The result, as soon as there is one: addresses, or the kind and text of an error.
type Outcome = Result<Vec<IpAddr>, (io::ErrorKind, String)>;

#[derive(Debug, Default)]
struct LookUp {
    outcome: Mutex<Option<Outcome>>,
    ended: Condvar,
}

/// The addresses of `host`, each with `port`.
///
/// # Errors
/// The look-up failed, or did not end within `timeout` (`TimedOut`).
pub(crate) fn addresses(host: &str, port: u16, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let look_up = running_or_new(host)?;
    let outcome = locked(&look_up.outcome);
    let waited = look_up.ended.wait_timeout_while(outcome, timeout, |outcome| outcome.is_none());
    let (outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
    match &*outcome {
        Some(Ok(found)) => Ok(found.iter().map(|address| SocketAddr::new(*address, port)).collect()),
        Some(Err((kind, text))) => Err(io::Error::new(*kind, text.clone())),
        None => Err(io::Error::new(io::ErrorKind::TimedOut, too_long(host, timeout))),
    }
}

fn too_long(host: &str, timeout: Duration) -> String {
    format!(
        "the name {host} was not looked up within {} s: check the name servers in /etc/resolv.conf, or use an address \
         instead of the name",
        timeout.as_secs_f64()
    )
}

fn running_or_new(host: &str) -> io::Result<Arc<LookUp>> {
    let mut running = locked(&RUNNING);
    let running = running.get_or_insert_default();
    if let Some(look_up) = running.get(host) {
        return Ok(Arc::clone(look_up));
    }
    let look_up = Arc::<LookUp>::default();
    let (own, name) = (Arc::clone(&look_up), host.to_owned());
    std::thread::Builder::new().name("bareblk-lookup".into()).spawn(move || {
        let outcome = (name.as_str(), 0).to_socket_addrs();
        let outcome = outcome.map(|found| found.map(|address| address.ip()).collect());
        // The next attempt after this one looks up the name again.
        locked(&RUNNING).get_or_insert_default().remove(&name);
        *locked(&own.outcome) = Some(outcome.map_err(|error| (error.kind(), error.to_string())));
        own.ended.notify_all();
    })?;
    running.insert(host.to_owned(), Arc::clone(&look_up));
    Ok(look_up)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn address_is_used_as_it_is_and_a_name_becomes_addresses() {
        let found = addresses("::1", 7, Duration::ZERO).unwrap();
        assert_eq!(found, ["[::1]:7".parse().unwrap()]);
        let found = addresses("localhost", 7, PATIENCE).unwrap();
        assert!(
            !found.is_empty() && found.iter().all(|it| it.ip().is_loopback() && it.port() == 7),
            "{found:?}"
        );
    }

    /// The name is longer than the domain name system allows, so no name server is asked.
    #[test]
    fn name_that_cannot_exist_is_an_error_for_each_attempt() {
        let name = format!("{}.example", "x".repeat(64));
        let errors = [(); 2].map(|()| addresses(&name, 7, PATIENCE).unwrap_err().to_string());
        assert!(errors.iter().all(|error| error.contains("failed to lookup address")), "{errors:?}");
    }
}
