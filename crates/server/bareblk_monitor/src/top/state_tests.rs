//! Tests of the keys and of their effects on the screen.

use super::super::fixture;
use super::*;

fn state() -> State {
    let mut state = State::new(vec![None], Duration::from_secs(1));
    state.note(0, News::Sample(Box::new(fixture::sample()), "0.1.0".into()));
    state
}

fn press(state: &mut State, keys: &[KeyCode]) -> Effect {
    keys.iter().fold(Effect::None, |_, code| state.key(KeyEvent::new(*code, KeyModifiers::NONE)))
}

fn type_words(state: &mut State, words: &str) {
    press(state, &words.chars().map(KeyCode::Char).collect::<Vec<_>>());
}

fn names(state: &State) -> Vec<String> {
    state.grid(Subject::Disks).rows.into_iter().map(|row| row.name).collect()
}

#[test]
fn busiest_disk_is_first_until_another_column_is_chosen() {
    let mut state = state();
    assert_eq!(names(&state), ["root", "db", "broken", "full", "idle"]);
    type_words(&mut state, "r");
    assert_eq!(names(&state)[3..], ["db", "root"]);
    // Sorted by MB/s, then by p50: rows without a latency come last.
    type_words(&mut state, "ss");
    assert_eq!(names(&state)[..2], ["db", "root"]);
}

#[test]
fn sort_goes_through_the_columns_that_are_shown() {
    let mut state = state();
    state.size = (39, 24);
    let shown = state.grid(Subject::Disks).visible(39).len();
    let begin = state.order(Subject::Disks);
    (0..shown).for_each(|_| type_words(&mut state, "s"));
    assert_eq!(state.order(Subject::Disks), begin);
}

#[test]
fn filter_is_typed_kept_and_given_up() {
    let mut state = state();
    type_words(&mut state, "/ROx");
    press(&mut state, &[KeyCode::Backspace, KeyCode::Enter]);
    assert_eq!((names(&state), state.typing.is_none()), (vec!["root".to_owned(), "broken".to_owned()], true));
    type_words(&mut state, "/q");
    assert_eq!(names(&state), Vec::<String>::new());
    press(&mut state, &[KeyCode::Esc]);
    assert_eq!(state.filter, "RO");
    press(&mut state, &[KeyCode::Esc]);
    assert_eq!(names(&state).len(), 5);
}

#[test]
fn filter_has_an_end() {
    let mut state = state();
    type_words(&mut state, &format!("/{}", "x".repeat(1000)));
    assert_eq!(state.filter.len(), LONGEST_FILTER);
}

#[test]
fn one_key_quits_a_screen_and_closes_what_covers_it() {
    let mut state = state();
    for open in [KeyCode::Char('?'), KeyCode::Enter] {
        press(&mut state, &[open]);
        assert_ne!(state.view, View::None);
        assert_eq!(press(&mut state, &[KeyCode::Char('q')]), Effect::None);
        assert_eq!(state.view, View::None);
        press(&mut state, &[open, KeyCode::Esc]);
        assert_eq!(state.view, View::None);
    }
    assert_eq!(press(&mut state, &[KeyCode::Esc]), Effect::None);
    assert_eq!(press(&mut state, &[KeyCode::Char('q')]), Effect::Quit);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    type_words(&mut state, "/");
    assert_eq!(state.key(interrupt), Effect::Quit);
}

#[test]
fn screens_without_anything_to_show_have_no_key() {
    let mut state = State::new(vec![None], Duration::from_secs(1));
    type_words(&mut state, "g");
    assert_eq!(state.screen, Screen::Table(Subject::Disks));
    type_words(&mut state, "h");
    assert_eq!(state.screen, Screen::Table(Subject::Disks));
    let mut state = self::state();
    type_words(&mut state, "g");
    assert_eq!(state.screen, Screen::Table(Subject::Groups));
    press(&mut state, &[KeyCode::Tab]);
    assert_eq!(state.screen, Screen::Heat);
    press(&mut state, &[KeyCode::Tab, KeyCode::BackTab, KeyCode::BackTab, KeyCode::BackTab]);
    assert_eq!(state.screen, Screen::Table(Subject::Workers));
}

#[test]
fn selected_row_stays_with_its_disk() {
    let mut state = state();
    press(&mut state, &[KeyCode::Down, KeyCode::Down]);
    assert_eq!(state.selected, Some((0, "db".into())));
    type_words(&mut state, "r");
    assert_eq!(state.selected, Some((0, "db".into())));
    press(&mut state, &[KeyCode::Enter]);
    assert_eq!(state.view, View::Disk((0, "db".into())));
    press(&mut state, &[KeyCode::Esc, KeyCode::Home, KeyCode::Up]);
    assert_eq!(state.selected, Some((0, "broken".into())));
    press(&mut state, &[KeyCode::End, KeyCode::PageDown]);
    assert_eq!(state.selected, Some((0, "root".into())));
}

#[test]
fn interval_has_steps_and_ends() {
    let mut state = state();
    assert_eq!(press(&mut state, &[KeyCode::Char('+')]), Effect::Pace);
    assert_eq!(state.interval, Duration::from_secs(2));
    (0..20).for_each(|_| type_words(&mut state, "-"));
    assert_eq!(state.interval, INTERVALS[0]);
    (0..20).for_each(|_| type_words(&mut state, "+"));
    assert_eq!(state.interval, INTERVALS[9]);
    state.interval = Duration::from_secs(3600);
    type_words(&mut state, "+");
    assert_eq!(state.interval, Duration::from_secs(3600));
}

#[test]
fn heat_is_of_all_disks_or_of_one() {
    let mut state = state();
    for second in 2..5 {
        let sample = Sample::between(&fixture::reading(second), &fixture::reading(second + 1));
        state.note(0, News::Sample(Box::new(sample), String::new()));
    }
    let all = state.heat(None);
    assert_eq!(all.len(), HISTORY);
    assert_eq!(all.iter().filter(|column| !column.is_empty()).count(), 4);
    let sum = |heat: &[HashMap<u8, u64>]| heat.last().unwrap().values().sum::<u64>();
    assert_eq!((sum(&all), sum(&state.heat(Some(&(0, "db".into()))))), (38_100 + 3000, 3000));
    state.filter = "idle".into();
    assert_eq!(sum(&state.heat(None)), 0);
}

#[test]
fn history_of_a_disk_has_an_end_and_goes_with_the_disk() {
    let mut state = state();
    for _ in 0..300 {
        state.note(0, News::Sample(Box::new(fixture::sample()), String::new()));
    }
    assert_eq!(state.servers[0].history["root"].len(), HISTORY);
    state.note(0, News::Sample(Box::default(), String::new()));
    assert!(state.servers[0].history.is_empty());
}
