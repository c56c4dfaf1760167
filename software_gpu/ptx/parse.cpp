#include <cctype>
#include <cstdlib>
#include <cstring>

#include "program.h"

namespace software_gpu {
namespace {

int bits_of_type(const std::string& type) {
    if (type == "pred") return 1;
    if (type == "f16x2" || type == "bf16x2") return 32;
    const size_t digits = type.find_first_of("0123456789");
    if (digits == std::string::npos) throw Fault("no such type: ." + type);
    return std::atoi(type.c_str() + digits);
}

std::string without_comments(const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text.compare(i, 2, "//") == 0) {
            while (i < text.size() && text[i] != '\n') ++i;
            out += '\n';
        } else if (text.compare(i, 2, "/*") == 0) {
            const size_t end = text.find("*/", i);
            i = end == std::string::npos ? text.size() : end + 1;
        } else {
            out += text[i];
        }
    }
    return out;
}

std::string trimmed(const std::string& text) {
    size_t begin = 0, end = text.size();
    while (begin < end && std::isspace(static_cast<unsigned char>(text[begin]))) ++begin;
    while (end > begin && std::isspace(static_cast<unsigned char>(text[end - 1]))) --end;
    return text.substr(begin, end - begin);
}

// At the commas outside of brackets.
std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::string part;
    int depth = 0;
    for (const char c : text) {
        depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
        if (c == ',' && depth == 0) {
            parts.push_back(trimmed(part));
            part.clear();
        } else {
            part += c;
        }
    }
    if (!trimmed(part).empty()) parts.push_back(trimmed(part));
    return parts;
}

bool is_name_character(char c) { return std::isalnum(static_cast<unsigned char>(c)) || strchr("_$%.@", c) != nullptr; }

// Names that inline assembly declares within braces are its own.
using Scopes = std::vector<std::map<std::string, std::string>>;

std::string resolved(const std::string& name, const Scopes& scopes) {
    for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
        const auto found = scope->find(name);
        if (found != scope->end()) return found->second;
    }
    return name;
}

// PTX ISA, "Constants".
uint64_t number_of(const std::string& text) {
    if (text.size() > 2 && text[0] == '0' && strchr("fFdD", text[1]) != nullptr)
        return std::strtoull(text.c_str() + 2, nullptr, 16);
    if (text[0] == '-') return static_cast<uint64_t>(std::strtoll(text.c_str(), nullptr, 0));
    return std::strtoull(text.c_str(), nullptr, 0);
}

bool is_number(const std::string& text) {
    return std::isdigit(static_cast<unsigned char>(text[0])) ||
           (text[0] == '-' && text.size() > 1 && std::isdigit(static_cast<unsigned char>(text[1])));
}

Operand parse_operand(std::string text, const Scopes& scopes) {
    Operand operand;
    text = trimmed(text);
    if (text.empty()) throw Fault("an empty operand");
    if (text[0] == '{') {
        operand.kind = Operand::Kind::kVector;
        for (const std::string& part : split(text.substr(1, text.size() - 2)))
            operand.parts.push_back(parse_operand(part, scopes));
        return operand;
    }
    if (text[0] == '[') {
        operand.kind = Operand::Kind::kAddress;
        const std::string inner = text.substr(1, text.size() - 2);
        const size_t plus = inner.find('+');
        operand.parts.push_back(parse_operand(inner.substr(0, plus), scopes));
        if (plus != std::string::npos) operand.number = number_of(trimmed(inner.substr(plus + 1)));
        return operand;
    }
    const size_t bar = text.find('|');
    if (bar != std::string::npos) {
        operand.kind = Operand::Kind::kPair;
        operand.parts = {parse_operand(text.substr(0, bar), scopes), parse_operand(text.substr(bar + 1), scopes)};
        return operand;
    }
    if (text[0] == '!') {
        operand = parse_operand(text.substr(1), scopes);
        operand.is_negated = true;
        return operand;
    }
    if (is_number(text)) {
        operand.number = number_of(text);
        return operand;
    }
    operand.text = resolved(text, scopes);
    operand.kind = operand.text[0] == '%' ? Operand::Kind::kRegister : Operand::Kind::kName;
    return operand;
}

class EntryParser {
  public:
    explicit EntryParser(Entry& entry) : entry_(entry) {}

    // `body` is what stands between the entry's braces.
    void parse(const std::string& body) {
        std::string statement;
        int depth = 0;
        for (size_t i = 0; i < body.size(); ++i) {
            const char c = body[i];
            const bool is_first = statement.find_first_not_of(" \t\n\r") == std::string::npos;
            if (c == '{' && is_first) {
                scopes_.emplace_back();
                scope_begins_.push_back(entry_.statements.size());
                ++num_scopes_;
                statement.clear();
                continue;
            }
            if (c == '}' && is_first) {
                bind_labels();
                scopes_.pop_back();
                scope_begins_.pop_back();
                statement.clear();
                continue;
            }
            // .loc and .file end with their line.
            if (c == '\n' && trimmed(statement).rfind(".loc", 0) == 0) {
                read_location(trimmed(statement));
                statement.clear();
                continue;
            }
            depth += (c == '{' || c == '[') - (c == '}' || c == ']');
            if (c == ';' && depth == 0) {
                read_statement(trimmed(statement));
                statement.clear();
            } else if (c == ':' && is_label(statement) && body.compare(i, 2, "::") != 0) {
                const std::string name = trimmed(statement);
                const std::string own = scope_begins_.empty() ? name : std::string("@").append(std::to_string(num_scopes_)).append("_").append(name);
                if (!scope_begins_.empty()) scopes_.back()[name] = own;
                entry_.labels[own] = static_cast<int>(entry_.statements.size());
                statement.clear();
            } else {
                statement += c;
            }
        }
    }

  private:
    static bool is_label(const std::string& text) {
        const std::string name = trimmed(text);
        if (name.empty()) return false;
        for (const char c : name)
            if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '$') return false;
        return true;
    }

    // Branches of a scope may come before their label.
    void bind_labels() {
        for (size_t i = scope_begins_.back(); i < entry_.statements.size(); ++i)
            for (Operand& operand : entry_.statements[i].operands) {
                const auto found = operand.kind == Operand::Kind::kName ? scopes_.back().find(operand.text) : scopes_.back().end();
                if (found != scopes_.back().end()) operand.text = found->second;
            }
    }

    void read_location(const std::string& text) { std::sscanf(text.c_str(), ".loc %d %d", &file_, &line_); }

    void declare_registers(const std::string& text) {
        const size_t space = text.find_first_of(" \t", 5);
        const int bits = bits_of_type(trimmed(text.substr(5, space - 5)).substr(1));
        for (const std::string& name : split(text.substr(space))) {
            const size_t angle = name.find('<');
            const int count = angle == std::string::npos ? 1 : std::atoi(name.c_str() + angle + 1);
            for (int i = 0; i < count; ++i) {
                const std::string written = angle == std::string::npos ? name : name.substr(0, angle) + std::to_string(i);
                const bool is_of_entry = scopes_.size() == 1 && written[0] == '%';
                const std::string own = is_of_entry ? written : "%@" + std::to_string(num_scopes_) + "_" + written;
                if (!is_of_entry) scopes_.back()[written] = own;
                entry_.register_bits[own] = bits;
            }
        }
    }

    void read_statement(std::string text) {
        if (text.empty() || text.rfind(".pragma", 0) == 0 || text.rfind(".file", 0) == 0) return;
        if (text.rfind(".reg", 0) == 0) return declare_registers(text);
        if (text[0] == '.') throw Fault("no such directive within an entry: " + text);
        Statement statement;
        statement.text = text;
        statement.file = file_;
        statement.line = line_;
        if (text[0] == '@') {
            const size_t space = text.find_first_of(" \t");
            statement.is_guard_negated = text[1] == '!';
            statement.guard = resolved(text.substr(statement.is_guard_negated ? 2 : 1, space - (statement.is_guard_negated ? 2 : 1)), scopes_);
            text = trimmed(text.substr(space));
        }
        size_t end = 0;
        while (end < text.size() && (is_name_character(text[end]) || text[end] == ':')) ++end;
        std::string word;
        for (const char c : text.substr(0, end) + ".") {
            if (c == '.') {
                statement.opcode.push_back(word);
                word.clear();
            } else {
                word += c;
            }
        }
        for (const std::string& operand : split(text.substr(end)))
            statement.operands.push_back(parse_operand(operand, scopes_));
        entry_.statements.push_back(std::move(statement));
    }

    Entry& entry_;
    Scopes scopes_{1};
    std::vector<size_t> scope_begins_;  // statements before each scope within the entry's
    int num_scopes_ = 0, file_ = 0, line_ = 0;
};

void read_parameters(Entry& entry, const std::string& text) {
    for (const std::string& parameter : split(text)) {
        const size_t type = parameter.find('.', 1) + 1;  // .param .u64 .ptr .global .align 1 name
        const int bytes = bits_of_type(parameter.substr(type, parameter.find_first_of(" \t", type) - type)) / 8;
        entry.parameter_bytes = (entry.parameter_bytes + bytes - 1) / bytes * bytes;
        const std::string name = parameter.substr(parameter.find_last_of(" \t") + 1);
        entry.parameters.push_back({name, entry.parameter_bytes, bytes});
        entry.parameter_bytes += bytes;
    }
}

size_t matching_brace(const std::string& text, size_t open) {
    int depth = 0;
    for (size_t i = open; i < text.size(); ++i) {
        depth += (text[i] == '{') - (text[i] == '}');
        if (depth == 0) return i;
    }
    throw Fault("a brace is not closed");
}

// .global .align 1 .b8 name[11] = {95, 95};
void read_globals(Module& module, const std::string& text) {
    for (size_t at = text.find(".global"); at != std::string::npos; at = text.find(".global", at + 1)) {
        const size_t bracket = text.find('[', at), end = text.find(';', at);
        if (bracket == std::string::npos || bracket > end) continue;
        if (text.substr(at, bracket - at).find(".b8") == std::string::npos) throw Fault("a global that is no array of bytes");
        const size_t name = text.find_last_of(" \t", bracket) + 1;
        std::vector<uint8_t> bytes(std::atoi(text.c_str() + bracket + 1));
        const size_t open = text.find('{', bracket);
        if (open < end) {
            size_t i = 0;
            for (const std::string& number : split(text.substr(open + 1, matching_brace(text, open) - open - 1)))
                bytes.at(i++) = static_cast<uint8_t>(number_of(number));
        }
        module.globals[text.substr(name, bracket - name)] = std::move(bytes);
    }
}

void read_files(Module& module, const std::string& text) {
    for (size_t at = text.find(".file"); at != std::string::npos; at = text.find(".file", at + 1)) {
        const size_t open = text.find('"', at), close = text.find('"', open + 1);
        if (close != std::string::npos) module.files[std::atoi(text.c_str() + at + 5)] = text.substr(open + 1, close - open - 1);
    }
}

}  // namespace

Module parse_module(const std::string& source) {
    Module module;
    const std::string text = without_comments(source);
    const size_t target = text.find(".target");
    if (target == std::string::npos) throw Fault("expected PTX, found no .target");
    module.target = trimmed(text.substr(target + 7, text.find_first_of(",\n", target) - target - 7));
    read_files(module, text);
    size_t before = 0;
    for (size_t at = text.find(".entry"); at != std::string::npos; at = text.find(".entry", at + 1)) {
        read_globals(module, text.substr(before, at - before));
        const size_t open = text.find('(', at), close = text.find(')', open), brace = text.find('{', close);
        Entry entry;
        entry.name = trimmed(text.substr(at + 6, open - at - 6));
        read_parameters(entry, text.substr(open + 1, close - open - 1));
        before = matching_brace(text, brace);
        EntryParser(entry).parse(text.substr(brace + 1, before - brace - 1));
        module.entries[entry.name] = std::move(entry);
    }
    return module;
}

}  // namespace software_gpu
