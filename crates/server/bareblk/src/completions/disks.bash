
# Completes disk names by asking the server, and everything else as above.
_bareblk_with_disks() {
    _bareblk "$@"
    local word verb= disks=0 control=() i
    local current="${COMP_WORDS[COMP_CWORD]}"
    [[ ${COMP_WORDS[1]} == ctl && $current != -* ]] || return 0
    for ((i = 2; i < COMP_CWORD; i++)); do
        word="${COMP_WORDS[i]}"
        case "$word" in
            --control | --socket) control=(--control "${COMP_WORDS[i + 1]}"); ((i++)) ;;
            --watch | --timeout | --completion-worker) ((i++)) ;;
            -*) ;;
            *) if [[ -z $verb ]]; then verb="$word"; else ((disks++)); fi ;;
        esac
    done
    # The current word is the value of an option.
    [[ $i -eq $COMP_CWORD ]] || return 0
    case "$verb" in
        stats) ;;
        attach | commit | flush | job | pause | placement | reclaim | remove | resize | resume | show | stream) [[ $disks -eq 0 ]] || return 0 ;;
        *) return 0 ;;
    esac
    local names
    names="$("${COMP_WORDS[0]}" ctl names "${control[@]}" 2>/dev/null)" || return 0
    mapfile -t COMPREPLY < <(compgen -W "$names" -- "$current")
}

complete -F _bareblk_with_disks -o nosort -o bashdefault -o default bareblk
